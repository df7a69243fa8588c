// What axe-core misses in the theme: wide tables and code scroll by keyboard too, and search and the actions of
// each block of code have names.
document$.subscribe(() => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  let number = 0;
  for (const nav of document.querySelectorAll(".md-code__nav")) {
    nav.setAttribute("aria-label", `Code block ${++number}`);
  }
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    wide.tabIndex = 0;
  }
});
