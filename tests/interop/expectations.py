"""What peft can't do by itself, and what peftlib refuses, with the reasons."""

# Regular expressions that peft's own error has to match.
PEFT_FAILS: dict[str, str] = {}

# Regular expressions that the refusal of `hf.load_adapter` has to match.
REFUSED: dict[str, str] = {}
