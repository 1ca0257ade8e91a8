"""Why a task vector works: circuits, heads, parts of its effect, how it travels, what it says."""

from mechtv.analysis.ablation import Ablation, ablate_heads
from mechtv.analysis.alignment import Alignment, task_alignment
from mechtv.analysis.attention import AttentionShares, attention_of_heads
from mechtv.analysis.decomposition import Decomposition, decompose
from mechtv.analysis.diagnostics import Diagnostics, diagnostics
from mechtv.analysis.head_maps import HeadMaps, head_maps
from mechtv.analysis.heads import HeadRanking, rank_heads
from mechtv.analysis.integrated_jacobian import IntegratedJacobian, integrate_jacobian
from mechtv.analysis.lens import lens_logits, lens_of, top_tokens
from mechtv.analysis.linearity import Linearity, linearity
from mechtv.analysis.logit_lens import Lens, logit_lens
from mechtv.analysis.propagation import Propagation, fit_propagation
from mechtv.analysis.readers import Readers, readers
from mechtv.analysis.reconstructed import Reconstruction, ReconstructionByLayer
from mechtv.analysis.reconstruction import reconstruct_by_layer, reconstruct_ov
from mechtv.analysis.rotation import RotationStretch, rotation_stretch

__all__ = [
    "Ablation",
    "Alignment",
    "AttentionShares",
    "Decomposition",
    "Diagnostics",
    "HeadMaps",
    "HeadRanking",
    "IntegratedJacobian",
    "Lens",
    "Linearity",
    "Propagation",
    "Readers",
    "Reconstruction",
    "ReconstructionByLayer",
    "RotationStretch",
    "ablate_heads",
    "attention_of_heads",
    "decompose",
    "diagnostics",
    "fit_propagation",
    "head_maps",
    "integrate_jacobian",
    "lens_logits",
    "lens_of",
    "linearity",
    "logit_lens",
    "rank_heads",
    "readers",
    "reconstruct_by_layer",
    "reconstruct_ov",
    "rotation_stretch",
    "task_alignment",
    "top_tokens",
]
