"""Settings of the engine as frozen dataclasses; ``EngineConfig.of`` makes one from flat names."""

from tandem.base.settings import Setting, setting, settings_of
from tandem.engine.config.cache import CacheConfig, GPUConfig
from tandem.engine.config.engine import EngineConfig, engine_settings
from tandem.engine.config.facts import ModelFacts, RopeFacts
from tandem.engine.config.model import ModelConfig
from tandem.engine.config.parallel import ParallelConfig
from tandem.engine.config.read import facts_of, read_facts
from tandem.engine.config.scheduler import SchedulerConfig

__all__ = [
    "CacheConfig",
    "EngineConfig",
    "GPUConfig",
    "ModelConfig",
    "ModelFacts",
    "ParallelConfig",
    "RopeFacts",
    "SchedulerConfig",
    "Setting",
    "engine_settings",
    "facts_of",
    "read_facts",
    "setting",
    "settings_of",
]
