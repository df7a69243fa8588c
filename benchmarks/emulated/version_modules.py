"""Modules whose memory may depend on the version of torch: one mechanism each, without a library's code."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Lstm(nn.Module):
    """A recurrent network of two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 128, padding_idx=0)
        self.recurrent = nn.LSTM(128, 256, num_layers=2, batch_first=True, dropout=0.1, bidirectional=True)
        self.head = nn.Linear(512, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the last position."""
        output, _ = self.recurrent(self.embedding(ids))
        return self.head(output[:, -1])


class Gru(nn.Module):
    """A recurrent network of one layer over given features."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(64, 192)
        self.head = nn.Linear(192, 10)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits of the mean over time."""
        output, _ = self.recurrent(features.transpose(0, 1))
        return self.head(output.mean(0))


class Encoder(nn.Module):
    """PyTorch's own transformer encoder, with a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.embedding = nn.Embedding(4000, 256)
        self.head = nn.Linear(256, 10)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the mean over positions."""
        encoded = self.encoder(self.embedding(ids), src_key_padding_mask=ids.eq(1))
        return self.head(encoded.mean(1))


class Seq2Seq(nn.Module):
    """PyTorch's own encoder and decoder, with a causal mask and attention to the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(128, 4, 2, 2, 512, norm_first=True, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits of the mean over positions."""
        mask = nn.Transformer.generate_square_subsequent_mask(features.shape[1], device=features.device)
        output = self.transformer(features, features, tgt_mask=mask, tgt_is_causal=True)
        return self.head(output.mean(1))


class Norms(nn.Module):
    """Group, layer, instance, batch and RMS norms between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.group = nn.GroupNorm(8, 64)
        self.instance = nn.InstanceNorm2d(64, affine=True, track_running_stats=True)
        self.batch = nn.BatchNorm2d(64)
        self.layer = nn.LayerNorm(64)
        self.rms = nn.RMSNorm(64)
        self.head = nn.Linear(64, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        x = F.silu(self.group(self.stem(image)))
        x = F.hardswish(self.instance(x))
        x = F.leaky_relu(self.batch(x), inplace=True)
        tokens = x.flatten(2).transpose(1, 2)
        tokens = self.rms(self.layer(tokens))
        return self.head(tokens.mean(1))


class Attention(nn.Module):
    """Scaled dot-product attention: plain, causal, with a boolean mask, with a bias that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(256, 768)
        self.bias = nn.Parameter(torch.zeros(1, 4, 100, 100))
        self.head = nn.Linear(256, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of the mean over positions."""
        batch, length, _ = tokens.shape
        parts = self.qkv(tokens).view(batch, length, 3, 4, 64).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mask = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        bias = self.bias.to(query.dtype).expand(batch, 4, length, length)
        plain = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1 * self.training)
        causal = F.scaled_dot_product_attention(query, key, plain, is_causal=True)
        masked = F.scaled_dot_product_attention(query, key, causal, attn_mask=mask)
        biased = F.scaled_dot_product_attention(query, key, masked, attn_mask=bias)
        return self.head(biased.transpose(1, 2).reshape(batch, length, 256).mean(1))


class Mlp(nn.Module):
    """Products with and without biases, in two and in three dimensions, and an outer product."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(512, 1024)
        self.second = nn.Linear(1024, 512, bias=False)
        self.experts = nn.Parameter(torch.zeros(4, 512, 256))
        self.bilinear = nn.Bilinear(256, 64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, features: Tensor) -> Tensor:
        """Return logits."""
        x = self.second(F.gelu(self.first(features), approximate="tanh")) + features
        x = torch.einsum("bf,efh->bh", x, self.experts)
        gates = F.softmax(x[:, :64], -1)
        outer = torch.bmm(gates.unsqueeze(2), gates.unsqueeze(1)).sum(2)
        return self.head(self.bilinear(F.dropout(x, 0.2, self.training), outer))


class Indexing(nn.Module):
    """Sorting, top-k, gathering, scattering, cumulative sums, interpolation, pooling and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, padding_mode="reflect")
        self.bag = nn.EmbeddingBag(1000, 32, mode="mean")
        self.head = nn.Linear(48, 10)

    def forward(self, image: Tensor) -> Tensor:
        """Return logits."""
        x = F.max_pool2d(F.interpolate(self.stem(image), scale_factor=2, mode="bilinear"), 2)
        x = F.adaptive_avg_pool2d(F.interpolate(x, scale_factor=2.0), 12)
        flat = x.flatten(1)
        values, places = flat.topk(64, dim=1)
        ranked = flat.gather(1, flat.argsort(1)[:, :64]).cumsum(1)
        spread = torch.zeros_like(flat).scatter_add(1, places, values * ranked)
        pooled = torch.where(spread > 0, spread, flat).view_as(x).amax((2, 3))
        words = self.bag((places % 1000).reshape(-1, 64))
        picked = pooled[:, torch.arange(16, device=image.device).flip(0)]
        return self.head(torch.cat((picked, words), 1))


class Conv3d(nn.Module):
    """Convolutions of volumes and their transposes, strided and grouped."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 16, 3, stride=2, padding=1)
        self.depthwise = nn.Conv3d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose3d(16, 8, 2, stride=2)
        self.norm = nn.BatchNorm3d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, volume: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.depthwise(self.down(volume)))
        x = F.max_pool3d(F.relu(self.norm(self.up(x))), 2)
        return self.head(x.mean((2, 3, 4)))
