"""Methods of the literature, one short file each; importing them makes their names known, in this order.

Written by docs/make_lists.py from the files in this folder: a new policy needs no line here.
"""

# isort: off
from jaxkv.policies.methods.full import FullKV
from jaxkv.policies.methods.streaming import StreamingLLM
from jaxkv.policies.methods.snapkv import SnapKV
from jaxkv.policies.methods.pyramidkv import PyramidKV
from jaxkv.policies.methods.simlayerkv import SimLayerKV
from jaxkv.policies.methods.cake import CAKE
from jaxkv.policies.methods.headkv import HeadKV
from jaxkv.policies.methods.lukv import LUKV
from jaxkv.policies.methods.duoattention import DuoAttention
from jaxkv.policies.methods.adakv import AdaKV
from jaxkv.policies.methods.heavy import H2O, RoCo, TOVA
from jaxkv.policies.methods.d2o import D2O
from jaxkv.policies.methods.cam import CaM
from jaxkv.policies.methods.criticalkv import CriticalKV
from jaxkv.policies.methods.pyramidinfer import PyramidInfer
from jaxkv.policies.methods.keydiff import KeyDiff
from jaxkv.policies.methods.qfilters import QFilters
from jaxkv.policies.methods.lagkv import LagKV
from jaxkv.policies.methods.curdkv import CurDKV
from jaxkv.policies.methods.capkv import CAPKV
from jaxkv.policies.methods.expectedattention import ExpectedAttention
from jaxkv.policies.methods.defensivekv import DefensiveKV, LayerDefensiveKV
from jaxkv.policies.methods.dropkv import DropKV
from jaxkv.policies.methods.rkv import RKV
from jaxkv.policies.methods.triattention import TriAttention
from jaxkv.policies.methods.compactor import Compactor
from jaxkv.policies.methods.chunkkv import ChunkKV
from jaxkv.policies.methods.globalbudget import GlobalBudget
from jaxkv.policies.methods.refit import Refit
from jaxkv.policies.methods.kvzap import KVzap
from jaxkv.policies.methods.fastkvzip import FastKVzip
from jaxkv.policies.methods.kvzip import KVzip, KVGrad
from jaxkv.policies.methods.omnikv import OmniKV, BrutalOffload
from jaxkv.policies.methods.quest import Quest
from jaxkv.policies.methods.rocketkv import RocketKV
from jaxkv.policies.methods.baselines import LocalWindow, KNorm, RandomKV
from jaxkv.policies.methods.auto import Auto
# isort: on

__all__ = [
    "AdaKV",
    "Auto",
    "BrutalOffload",
    "CAKE",
    "CAPKV",
    "CaM",
    "ChunkKV",
    "Compactor",
    "CriticalKV",
    "CurDKV",
    "D2O",
    "DefensiveKV",
    "DropKV",
    "DuoAttention",
    "ExpectedAttention",
    "FastKVzip",
    "FullKV",
    "GlobalBudget",
    "H2O",
    "HeadKV",
    "KNorm",
    "KVGrad",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "LUKV",
    "LagKV",
    "LayerDefensiveKV",
    "LocalWindow",
    "OmniKV",
    "PyramidInfer",
    "PyramidKV",
    "QFilters",
    "Quest",
    "RKV",
    "RandomKV",
    "Refit",
    "RoCo",
    "RocketKV",
    "SimLayerKV",
    "SnapKV",
    "StreamingLLM",
    "TOVA",
    "TriAttention",
]
