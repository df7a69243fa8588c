from .builder import Loops as Loops
from .foretold import Foretold as Foretold
from .kernel_calls import UnsteadyError as UnsteadyError
from .recast import Loop as Loop
from .validate import open_keeper as open_keeper, open_keeper_of as open_keeper_of
