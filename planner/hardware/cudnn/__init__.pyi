from .client import (
    Cudnn as Cudnn, describe_for_cudnn as describe_for_cudnn, open_answer_cache as open_answer_cache,
    open_cudnn as open_cudnn,
)
from .published import PublishedWorkspaces as PublishedWorkspaces
from .stored import StoredWorkspaces as StoredWorkspaces
from .workspace_breakdown import (
    LayerWorkspace as LayerWorkspace, Part as Part, Term as Term, layer_workspaces as layer_workspaces,
)
