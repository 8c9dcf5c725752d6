"""Examples at the end of each command's help."""

from __future__ import annotations

EXAMPLES = {
    "generate": (
        'bitmtp generate "Explain what a list comprehension is."',
        "cat notes.txt | bitmtp generate --max-tokens 512",
        'bitmtp generate "Make up a person." --schema person.json',
        'bitmtp generate "Once upon a time" --temperature 0.8 --seed 7 --json',
    ),
    "chat": ("bitmtp chat", 'bitmtp chat --system "Answer in one sentence." --policy auto'),
    "info": ("bitmtp info", "bitmtp info FOLDER", "bitmtp info --expect"),
    "bench": (
        "bitmtp bench",
        "bitmtp bench --prompts FILE --policy auto,speculative --limit 5",
        "bitmtp bench --shape bonsai-1.7b",
    ),
    "convert": (
        "bitmtp convert bonsai-1.7b.gguf models/bonsai",
        "bitmtp convert HUGGING_FACE_FOLDER models/bitnet --embedding-bits 8",
    ),
    "eval": (
        "bitmtp eval --data FOLDER --tasks gsm8k --limit 50",
        "bitmtp eval --data FOLDER --policy speculative:8,hybrid:4 --lossy-limit 200 --json eval.json",
    ),
    "study": (
        "bitmtp study --data FOLDER --workloads plain --limit 20",
        "bitmtp study --compare first/study.json second/study.json",
    ),
    "tune": ("bitmtp tune", "bitmtp tune --prompts FILE --limit 20"),
    "serve": (
        "bitmtp serve",
        "bitmtp serve --port 9000 --slots 4",
        "bitmtp serve --host 0.0.0.0 --api-key-file keys.txt",
    ),
    "train": (
        "bitmtp train recipes/smollm2-135m.toml",
        "bitmtp train recipes/smollm2-135m.toml --stop-after 3600",
    ),
}
START = ('bitmtp generate "Write a haiku."', "bitmtp chat", "bitmtp serve", "bitmtp COMMAND -h")


def epilog(examples: tuple[str, ...]) -> str:
    """Examples as the end of a help text, each on a line of its own."""
    lines = "\n".join(f"  {example}" for example in examples)
    return f"\b\nExamples:\n{lines}"
