"""`data.sampler`: a class of the user's own that decides which prompts come next."""

from __future__ import annotations

import inspect
from typing import Any

from ppo_lib.errors import ConfigError, PPOLibError
from ppo_lib.load_object import load_object

KEY = "data.sampler"


def sampler_class(config: Any) -> type | None:
    """The class that `data.sampler` names, or None; `config` is the section `data`.

    Raises `ConfigError` if it is not there, or cannot be made and drawn from.
    """
    path, name = config.sampler.class_path, config.sampler.class_name
    if not path:
        return None
    cls = load_object(path, name or "", KEY, ("class_path", "class_name"))
    if not (inspect.isclass(cls) and hasattr(cls, "__iter__") and hasattr(cls, "__len__")):
        raise ConfigError(f"{KEY}: {name} in {path} is no sampler: it needs __iter__ and __len__.")
    try:
        inspect.signature(cls).bind(data_source=None, data_config=None)
    except TypeError as error:
        raise ConfigError(f"{KEY}: {name} is made with the keywords data_source and data_config; {error}.") from None
    return cls


def create_sampler(config: Any, dataset: Any) -> Any:
    """The sampler of `data.sampler` over `dataset`, or None where none is named.

    It is made as `cls(data_source=dataset, data_config=config)`; `ResumableDataLoader` says how it is drawn from.
    """
    cls = sampler_class(config)
    if cls is None:
        return None
    try:
        return cls(data_source=dataset, data_config=config)
    except PPOLibError:
        raise
    except Exception as error:
        raise ConfigError(f"{KEY}: {cls.__name__} cannot be made: {type(error).__name__}: {error}") from error
