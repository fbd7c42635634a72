from roll.api import Check as Check
from roll.api import Run as Run
from roll.api import check as check
from roll.api import load_config as load_config
from roll.api import run as run
from roll.clients.models import EngineClient as EngineClient
from roll.clients.models import TrainClient as TrainClient
from roll.clients.workers import Workers as Workers
from roll.config.reading.errors import ConfigError as ConfigError
from roll.strategies.engines.requests import SamplingParams as SamplingParams
from roll.tracking.callbacks import STOP as STOP
from roll.tracking.callbacks import Callback as Callback

__version__: str
