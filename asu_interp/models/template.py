"""How a prompt is put to a model: as it stands, as Question/Answer, or through the tokenizer's chat template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asu_interp.errors import ModelError

TEMPLATES = ("bare", "qa", "chat")


@dataclass(frozen=True)
class Template:
    """`bare`: "{prompt} {answer}"; `qa`: "Question: {prompt}\\nAnswer: {answer}"; `chat`: the tokenizer's own."""

    name: str = "bare"

    def __post_init__(self) -> None:
        if self.name not in TEMPLATES:
            raise ModelError(f'template "{self.name}": allowed are {", ".join(TEMPLATES)}')

    def prompt(self, prompt: str, tokenizer: Any) -> str:
        """The text the model reads before it answers. Raises ModelError without a chat template."""
        if self.name == "qa":
            return f"Question: {prompt}\nAnswer:"
        if self.name == "chat":
            if not getattr(tokenizer, "chat_template", None):
                raise ModelError('template "chat": this tokenizer has no chat template; use "bare" or "qa"')
            turn = [{"role": "user", "content": prompt}]
            return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return prompt

    @property
    def separator(self) -> str:
        """What stands between prompt and answer."""
        return "" if self.name == "chat" else " "

    @property
    def adds_special_tokens(self) -> bool:
        """Whether the tokenizer still has to add its beginning-of-text token."""
        return self.name != "chat"
