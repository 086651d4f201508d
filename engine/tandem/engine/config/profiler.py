"""Settings of the profiles of an engine's steps."""

from dataclasses import dataclass

from tandem.protocol.settings import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Profiles that an administrator requests (`/start_profile`, `LLM.start_profile`)."""

    torch_profiler_dir: str | None = setting(
        None,
        "Folder for profiles by torch's profiler, a trace of Chrome's format each; none: no "
        "profile can be started.",
    )
