"""Errors of conversions between text and ids.

TandemError
├── InvalidParameter          from protocol: the client sent a value that is not allowed
│   └── ContextLengthExceeded prompt and answer do not fit the model's context
└── UnusableFolder            a prepared folder whose tokenizer cannot be used
"""

from tandem.protocol.errors import InvalidParameter, TandemError


class ContextLengthExceeded(InvalidParameter):
    """The prompt, or the prompt with the requested answer, is longer than the context.

    ``num_prompt_tokens`` is a lower bound if the text was not tokenized.
    """

    def __init__(
        self,
        param: str,
        *,
        num_prompt_tokens: int,
        max_tokens: int | None,
        max_model_len: int,
        at_least: bool = False,
        draws: bool = True,
    ) -> None:
        """``draws``: tokens are requested in addition to the prompt."""
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.at_least = at_least
        asked = "at least one token" if max_tokens is None else f"max_tokens={max_tokens}"
        beside = f" and {asked} is asked for" if draws else ""
        bound = "at least " if at_least else ""
        super().__init__(
            param,
            max_tokens if param == "max_tokens" else num_prompt_tokens,
            f"the prompt has {bound}{num_prompt_tokens} tokens{beside}, "
            f"but this model's maximum context length is {max_model_len} tokens",
        )

    def of_a_prompt(self, param: str) -> "ContextLengthExceeded":
        """Return the error for a prompt that is answered without tokens."""
        return ContextLengthExceeded(
            param,
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=None,
            max_model_len=self.max_model_len,
            at_least=self.at_least,
            draws=False,
        )


class UnusableFolder(TandemError):
    """A prepared folder has no tokenizer that can be read."""
