"""Single modules of torch whose kernels no rule can describe: recurrent layers, CTC loss, transformers in evaluation.

Importing it takes over the operators that these modules call.
"""

from onecard.train.modules import ctc as _ctc  # noqa: F401
from onecard.train.modules import recurrent as _recurrent  # noqa: F401
from onecard.train.modules import transformer as _transformer  # noqa: F401
