"use strict";
// Draws the figures that the planner computed, and moves the batch curve's marker and card. Nothing is computed
// here: each figure of each batch size on each card stands in the data.
const MIB = 2 ** 20;
const data = JSON.parse(document.getElementById("planner-data").textContent);
const moduleColours = data.figures.modules.data[0].marker.colors;
const at = (id) => document.getElementById(id);
const mib = (bytes) =>
  (bytes / MIB).toLocaleString("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 }) + " MiB";

function themed(name) {
  const style = getComputedStyle(document.documentElement);
  const [ink, line, panel] = ["--ink", "--line", "--panel"].map((key) => style.getPropertyValue(key).trim());
  const layout = {
    "font.color": ink,
    "font.family": "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif",
    "font.size": 13,
    "modebar.bgcolor": "rgba(0,0,0,0)",
    "modebar.color": style.getPropertyValue("--faint").trim(),
    "modebar.activecolor": ink,
    "hoverlabel.bgcolor": panel,
    "hoverlabel.bordercolor": line,
    "hoverlabel.font.color": ink,
  };
  if (name !== "modules") {
    for (const axis of ["xaxis", "yaxis"]) {
      layout[axis + ".gridcolor"] = line;
      layout[axis + ".linecolor"] = line;
      layout[axis + ".zerolinecolor"] = line;
    }
    layout["xaxis.showgrid"] = name !== "timeline";
  }
  const inked = data.figures[name].data.map((trace, i) => [trace.meta?.ink, i]).filter((pair) => pair[0]);
  return { layout, ink, line, panel, inked: inked.map((pair) => pair[1]) };
}

function paint() {
  return Promise.all(Object.keys(data.figures).map((name) => {
    const { layout, ink, inked, panel, line } = themed(name);
    if (name === "modules") {
      const colours = moduleColours.map((colour) => colour ?? panel);
      return Plotly.update(at(name), { "marker.colors": [colours], "marker.line.color": line }, layout);
    }
    const colours = inked.length ? { "line.color": ink, "marker.color": ink } : {};
    return Plotly.update(at(name), colours, layout, inked.length ? inked : undefined);
  }));
}

// On a narrow screen the names of phases would lie over each other; those of the steps stay.
function thin(name, layout) {
  if (name !== "timeline" || at(name).clientWidth >= 600) return;
  layout.annotations = layout.annotations.filter((one) => one.text.startsWith("<b>"));
}

async function draw() {
  // plotly.js 4 offers by default to send the figure to its maker's site.
  const alone = { showSendToCloud: false, plotlyServerURL: "" };
  const buttons = { displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const config = { responsive: true, ...alone, ...buttons };
  for (const [name, figure] of Object.entries(data.figures)) {
    thin(name, figure.layout);
    await Plotly.newPlot(at(name), figure.data, figure.layout, config);
  }
  await paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  if (data.curve) await follow(data.curve);
  document.body.dataset.drawn = "yes";
}

async function follow(curve) {
  const [gpu, slider] = [at("gpu"), at("batch")];
  const trace = Object.fromEntries(data.figures.curve.data.map((one, i) => [one.meta.key, i]));
  const marks = { yes: ["circle", "#009E73"], with_retries: ["diamond", "#E69F00"], no: ["x", "#D55E00"] };
  const card = () => curve.cards[gpu.value];
  const nearest = (batch) => {
    const far = card().batch.map((one) => Math.abs(one - batch));
    return far.indexOf(Math.min(...far));
  };

  const chooseBatch = () => {
    const [one, i] = [card(), Number(slider.value)];
    const outcome = one.outcome[i];
    at("batch-text").value = one.batch[i].toLocaleString("en-US");
    slider.setAttribute("aria-valuetext", "batch " + one.batch[i]);
    at("fits").textContent = data.verdicts[outcome];
    at("fits").className = outcome;
    for (const key of ["allocated", "reserved", "process", "process_upper"]) at(key).textContent = mib(one[key][i]);
    at("headroom").textContent = one.usable === null ? "–" : mib(one.usable - one.process[i]);
    const [symbol, colour] = marks[outcome];
    const levels = [one.process[i], one.reserved[i], one.allocated[i]].map((bytes) => bytes / MIB);
    const moved = { x: [levels.map(() => one.batch[i])], y: [levels] };
    return Plotly.restyle(at("curve"), { ...moved, "marker.symbol": symbol, "marker.color": colour }, [trace.marker]);
  };

  const chooseCard = async (batch) => {
    const one = card();
    slider.max = one.batch.length - 1;
    slider.value = nearest(batch);
    at("largest").disabled = !one.max_batch;
    at("largest").textContent = one.max_batch === null ? "No GPU chosen"
      : one.max_batch ? "Largest that fits: " + one.max_batch.toLocaleString("en-US") : "Not even 1 fits";
    const ends = [one.batch[0], one.batch[one.batch.length - 1]];
    const keys = ["process_upper", "process", "reserved", "allocated"];
    const lines = ["card", "limit"].map((key) => one[key === "card" ? "usable" : "limit"]);
    const across = lines.map((level) => (level === null ? [] : ends));
    const x = [...keys.map(() => one.batch), ...across];
    const y = [...keys.map((key) => one[key].map((bytes) => bytes / MIB)),
      ...lines.map((level) => (level === null ? [] : ends.map(() => level / MIB)))];
    const showlegend = [...keys.map(() => true), ...lines.map((level) => level !== null)];
    await Plotly.restyle(at("curve"), { x, y, showlegend }, [...keys, "card", "limit"].map((key) => trace[key]));
    at("card-text").textContent = one.about;
    await chooseBatch();
    await Plotly.relayout(at("curve"), { "xaxis.autorange": true, "yaxis.autorange": true });
  };

  slider.addEventListener("input", chooseBatch);
  gpu.addEventListener("change", () => chooseCard(Number(at("batch-text").value.replaceAll(",", ""))));
  at("largest").addEventListener("click", () => {
    slider.value = nearest(card().max_batch);
    chooseBatch();
  });
  gpu.value = curve.chosen;
  await chooseCard(data.batch);
}

draw();
