"""Plan model types of transformers on one GPU, training and inference.

python -m benchmarks.models.transformers [--models REGEX] [--to FOLDER]
"""

from benchmarks.models.table import Entry, Table, run

GPU_MIB = 200_000  # 7 billion parameters in fp32 with their gradients fit; most defaults are smaller by far
TYPES = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "modernbert"),
    *("xlnet", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "codegen", "llama", "mistral", "qwen2"),
    *(
        "qwen3",
        "gemma",
        "gemma2",
        "phi",
        "phi3",
        "falcon",
        "stablelm",
        "olmo2",
        "granite",
        "mamba",
        "mixtral",
    ),
    *("qwen2_moe", "t5", "bart", "mbart", "pegasus", "blenderbot", "led", "vit", "deit", "beit", "swin"),
    *("swinv2", "convnext", "convnextv2", "dinov2", "resnet", "segformer", "mobilevit", "clip", "siglip"),
    *("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer"),
)
ABOUT = (
    "Each type has its default configuration, the head of its task (`hf:TYPE`) and the inputs that follow: "
    "128 tokens with a padded mask, the configuration's image, 10 s of sound. Training: SGD and the model's "
    "own loss. Inference: eval mode, no gradients."
)


def main() -> None:
    """Plan, print, write."""
    entries = [Entry(name, f"hf:{name}") for name in TYPES]
    run(Table("transformers", "Models of transformers, planned", ABOUT, entries, ["transformers"], GPU_MIB))


if __name__ == "__main__":
    main()
