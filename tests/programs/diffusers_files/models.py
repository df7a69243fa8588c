"""Small models of the kinds that Stable Diffusion has: U-Net, autoencoder, text encoder."""

from diffusers import AutoencoderKL, FluxTransformer2DModel, SD3Transformer2DModel, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

WIDTH = 256  # of a text's tokens


def make_unet(sdxl=False):
    if sdxl:
        return UNet2DConditionModel(
            sample_size=32,
            block_out_channels=(64, 128, 256),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=(1, 2, 4),
            attention_head_dim=(1, 2, 4),
            cross_attention_dim=WIDTH,
            addition_embed_type="text_time",
            addition_time_embed_dim=32,
            projection_class_embeddings_input_dim=448,
            use_linear_projection=True,
        )
    return UNet2DConditionModel(
        block_out_channels=(64, 128, 256, 256),
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        norm_num_groups=16,
    )


def make_vae():
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(32, 64, 128, 128),
        layers_per_block=2,
        sample_size=256,
    )


def make_text_encoder():
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=5000,
            hidden_size=WIDTH,
            intermediate_size=4 * WIDTH,
            num_hidden_layers=6,
            num_attention_heads=4,
            projection_dim=WIDTH,
        )
    )


def make_sd3():
    return SD3Transformer2DModel(
        num_layers=6,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        caption_projection_dim=256,
        pooled_projection_dim=WIDTH,
        sample_size=32,
        pos_embed_max_size=48,
    )


def make_flux():
    return FluxTransformer2DModel(
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=4,
        attention_head_dim=64,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(16, 24, 24),
    )
