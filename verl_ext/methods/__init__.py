"""The advantage estimators of this package. Each one is a `Method`.

To add a method, write a `Method` and list it here by its name, the value of `algorithm.adv_estimator`, which is also
the name of its section of settings. A method that is a fixed list of steps is one entry of `simple`. A method whose
settings choose between steps has a file of its own, with its formula.
"""

from collections.abc import Mapping

from verl_ext.methods.compose import COMPOSE
from verl_ext.methods.dgpo import DGPO
from verl_ext.methods.drgrpo import DRGRPO
from verl_ext.methods.gdpo import GDPO
from verl_ext.methods.hadw import HADW
from verl_ext.methods.method import Method
from verl_ext.methods.simple import SIMPLE_METHODS

METHODS: Mapping[str, Method] = {
    "compose": COMPOSE,
    "dgpo": DGPO,
    "drgrpo": DRGRPO,
    "gdpo": GDPO,
    "hadw": HADW,
    **SIMPLE_METHODS,
}
"""By name."""
