"""Independent float64 oracles of every policy: plain loops over numpy, sharing no code with the library.

An oracle works on ONE sequence of n tokens, without batch or padding. Letters: K kv heads, G query heads per kv head,
H = K * G query heads (query head h reads kv head h // G), n positions, w rows of the observation window, D head dim,
L layers. Kept positions are a list of K ascending lists.

An oracle that selects by scores returns `(kept, gap)`. `gap` is the smallest relative distance between the score of a
kept row and a *different* score of a dropped row, at any cut made; inf where nothing is cut. Exact ties do not count:
max pooling copies one score to its neighbours, so equal scores at a cut are the rule there, and the tie rule (lowest
position first) decides them the same way in every precision. Tests reject inputs whose gap is under `MIN_GAP`.
"""

# A module's functions are named here by a star, so that a new oracle needs no line.
# ruff: noqa: F403
from oracles.ada import *
from oracles.attention import *
from oracles.baselines import *
from oracles.budgets import *
from oracles.cake import *
from oracles.capkv import *
from oracles.chunkkv import *
from oracles.columns import *
from oracles.compactor import *
from oracles.curdkv import *
from oracles.dropkv import *
from oracles.duo import *
from oracles.evict import *
from oracles.gates import *
from oracles.headkv import *
from oracles.lagkv import *
from oracles.merging import *
from oracles.policies import *
from oracles.qfilters import *
from oracles.quest import *
from oracles.replay import *
from oracles.rkv import *
from oracles.scores import *
from oracles.select import *
from oracles.simlayerkv import *
from oracles.theorems import *
from oracles.triattention import *
from oracles.unseen import *
from oracles.variance import *
