"""Which backend compiles what a request asks for."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Lock

from tandem.engine.structured.grammar import (
    Compiler,
    Grammar,
    GrammarError,
    NoCompiler,
    Waits,
    untold,
)
from tandem.protocol.structured import StructuredOutputsParams

logger = logging.getLogger(__name__)

COMPILING_THREADS = {"guidance": 2, "auto": 16, "outlines": 16}
"""By backend: those of outlines wait for a process, and a text of guidance is not to wait behind
them."""


def make_compiler(backend: str, folder: Path, vocab_size: int) -> Compiler:
    """The compiler of ``structured_outputs_backend`` for the model in ``folder``. Raises
    NoCompiler."""
    if backend == "outlines":
        return _outlines(folder, vocab_size)
    try:
        from tandem.engine.structured.llguidance import LLGuidanceCompiler
    except ImportError as error:
        raise NoCompiler(str(error)) from error
    guidance = LLGuidanceCompiler(folder, vocab_size)
    return guidance if backend == "guidance" else AutoCompiler(guidance, folder, vocab_size)


def _outlines(folder: Path, vocab_size: int) -> Compiler:
    try:
        import outlines_core  # noqa: F401  the process that uses it does not say why it cannot

        from tandem.engine.structured.outlines import OutlinesCompiler
    except ImportError as error:
        raise NoCompiler(f"{error}; install tandem-serving[outlines]") from error
    return OutlinesCompiler(folder, vocab_size)


class AutoCompiler:
    """Guidance compiles what it can; what it refuses goes to outlines, where that is installed, and
    is refused in guidance's words if outlines refuses it, too. Implements Compiler."""

    def __init__(self, guidance: Compiler, folder: Path, vocab_size: int) -> None:
        """``folder`` and ``vocab_size`` are of the model."""
        self._guidance = guidance
        self._outlines: Compiler | None = None
        self._has_outlines = True
        self._making = Lock()
        self._model = folder, vocab_size

    @property
    def is_preparing(self) -> bool:
        """See Compiler."""
        other = self._outlines
        return self._making.locked() if other is None else other.is_preparing

    def compile(self, wanted: StructuredOutputsParams, waits: Waits = untold, /) -> Grammar:
        """See Compiler."""
        try:
            return self._guidance.compile(wanted, waits)
        except GrammarError as error:
            other = self._other()
            if other is None:
                raise
            try:
                return other.compile(wanted, waits)
            except GrammarError as also:
                logger.debug("outlines refuses it, too: %s", also)
                raise error from None

    def close(self) -> None:
        """See Compiler."""
        with self._making:
            self._has_outlines = False
            other = self._outlines
        self._guidance.close()
        if other is not None:
            other.close()

    def _other(self) -> Compiler | None:
        """Outlines, made with the first text that guidance refuses."""
        with self._making:
            if self._outlines is None and self._has_outlines:
                try:
                    self._outlines = _outlines(*self._model)
                except NoCompiler as error:
                    self._has_outlines = False
                    logger.info("guidance alone compiles grammars: %s", error)
            return self._outlines
