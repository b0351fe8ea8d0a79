"""A CUDA allocator layer for PyTorch that keeps training inside a VRAM budget.

    import torch, stagehand_alloc
    with stagehand_alloc.pool(high="20GiB", low="16GiB") as pool:
        loss = model(batch)
    loss.backward()
    print(pool.stats())

`allocator` makes it this process's CUDA allocator, which is one line more.

Importing it loads neither torch nor the CUDA driver.
"""

from stagehand_alloc._books.plan import PlanLine as PlanLine
from stagehand_alloc._books.plan import StepPlan as StepPlan
from stagehand_alloc._books.stats import PoolStats as PoolStats
from stagehand_alloc._books.stats import reset_peak_stats as reset_peak_stats
from stagehand_alloc._books.stats import stats as stats
from stagehand_alloc._books.steps import StepStats as StepStats
from stagehand_alloc._errors import AllocatorTooLateError as AllocatorTooLateError
from stagehand_alloc._errors import AlreadyInstalledError as AlreadyInstalledError
from stagehand_alloc._errors import ChecksumError as ChecksumError
from stagehand_alloc._errors import CompilerError as CompilerError
from stagehand_alloc._errors import ConfigError as ConfigError
from stagehand_alloc._errors import DriverError as DriverError
from stagehand_alloc._errors import DriverNotFoundError as DriverNotFoundError
from stagehand_alloc._errors import DriverTooOldError as DriverTooOldError
from stagehand_alloc._errors import ForkedError as ForkedError
from stagehand_alloc._errors import InstallError as InstallError
from stagehand_alloc._errors import ModeError as ModeError
from stagehand_alloc._errors import NestedPoolError as NestedPoolError
from stagehand_alloc._errors import NoCudaBuildError as NoCudaBuildError
from stagehand_alloc._errors import NotBuiltError as NotBuiltError
from stagehand_alloc._errors import OffloadError as OffloadError
from stagehand_alloc._errors import PoolError as PoolError
from stagehand_alloc._errors import PoolThreadError as PoolThreadError
from stagehand_alloc._errors import RecomputeError as RecomputeError
from stagehand_alloc._errors import SimulatorError as SimulatorError
from stagehand_alloc._errors import SizeError as SizeError
from stagehand_alloc._errors import StagehandError as StagehandError
from stagehand_alloc._errors import TelemetryError as TelemetryError
from stagehand_alloc._errors import TorchTooOldError as TorchTooOldError
from stagehand_alloc._errors import VirtualMemoryError as VirtualMemoryError
from stagehand_alloc._pictures.snapshot import snapshot as snapshot
from stagehand_alloc._pictures.timeline import Timeline as Timeline
from stagehand_alloc._pictures.timeline import timeline as timeline
from stagehand_alloc._settings.config import Config as Config
from stagehand_alloc._settings.link import LaneLimits as LaneLimits
from stagehand_alloc._settings.load import load_config as load_config
from stagehand_alloc._step.hooks import SavedTensorInfo as SavedTensorInfo
from stagehand_alloc._step.pool import Pool as Pool
from stagehand_alloc._step.pool import keep as keep
from stagehand_alloc._step.pool import pool as pool
from stagehand_alloc._step.regions import checkpoint as checkpoint
from stagehand_alloc._step.regions import when_needed as when_needed
from stagehand_alloc._tell import StagehandWarning as StagehandWarning
from stagehand_alloc._torch_side.install import allocator as allocator
from stagehand_alloc._weights.access import resident as resident
from stagehand_alloc._weights.access import visit as visit
from stagehand_alloc._weights.offload import offload as offload
from stagehand_alloc._weights.offload import restore as restore
from stagehand_alloc._weights.optimizer import offload_optimizer as offload_optimizer

__version__ = "0.1.0"
