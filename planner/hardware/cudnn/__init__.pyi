from .client import Cudnn as Cudnn, describe_for_cudnn as describe_for_cudnn, open_cudnn as open_cudnn
from .per_layer import LayerWorkspace as LayerWorkspace, layer_workspaces as layer_workspaces
from .workspace_breakdown import Part as Part, Term as Term
