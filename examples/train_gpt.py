"""Train a character-level GPT on text every machine has: the source of Python's standard library.

    python examples/train_gpt.py --stages 2

`fit` is the training loop of a single process. The model it trains lives in `--stages` of them.
"""

import argparse
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import rpcpipe


class Embedding(nn.Module):
    def __init__(self, vocab: int, context: int, width: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, width), nn.Embedding(context, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.token(x) + self.position.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def gpt(vocab: int, context: int, blocks: int, width: int = 128, heads: int = 4) -> nn.Sequential:
    body = [Block(width, heads) for _ in range(blocks)]
    head = [nn.LayerNorm(width), nn.Linear(width, vocab)]
    return nn.Sequential(Embedding(vocab, context, width), *body, *head)


def read_text(size: int = 2_000_000) -> tuple[str, Tensor]:
    """The alphabet, and the text as indices into it."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(file.read_text("ascii", "ignore") for file in files)[:size]
    codes, indices = torch.tensor(list(text.encode())).unique(return_inverse=True)
    return bytes(codes.tolist()).decode(), indices


def batches(text: Tensor, steps: int, size: int, context: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(steps):
        windows = text[torch.randint(len(text) - context, (size, 1)) + torch.arange(context + 1)]
        yield windows[:, :-1], windows[:, 1:]


def fit(pipe: rpcpipe.Pipe, opt: torch.optim.Optimizer, data: Iterable) -> Iterator[float]:
    for x, y in data:
        loss = F.cross_entropy(pipe(x).flatten(0, 1), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        yield loss.item()


def generate(pipe: rpcpipe.Pipe, window: Tensor, length: int) -> Iterator[int]:
    for _ in range(length):
        index = torch.multinomial((pipe(window[None])[0, -1] / 0.7).softmax(0), 1)
        window = torch.cat([window[1:], index])
        yield index.item()


def train(world: rpcpipe.World, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    alphabet, text = read_text()
    held_out, text = text[:100_000], text[100_000:]
    shape = args.batch, args.context
    model = gpt(len(alphabet), args.context, blocks=max(6, world.stages))
    sample, _ = next(batches(text, 1, *shape))  # what the balance is measured with
    pipe = rpcpipe.Pipe(model, world, sample=sample, chunks=args.chunks, checkpoint="never")
    opt = pipe.optimizer(torch.optim.AdamW, lr=3e-3)
    losses, start = [], time.perf_counter()
    for loss in (bar := tqdm(fit(pipe, opt, batches(text, args.steps, *shape)), total=args.steps)):
        losses.append(loss)
        bar.set_postfix(loss=f"{loss:.2f}", refresh=False)  # shown with the next refresh
    speed = args.steps * args.batch * args.context / (time.perf_counter() - start)
    with pipe.record() as timeline:  # five more steps, watched
        losses += fit(pipe, opt, batches(text, 5, *shape))
    first, last = losses[0], sum(losses[-10:]) / 10
    pipe.eval()
    with torch.no_grad():
        ((x, y),) = batches(held_out, 1, *shape)
        unseen = F.cross_entropy(pipe(x).flatten(0, 1), y.flatten())
        print("".join(alphabet[k] for k in generate(pipe, held_out[: args.context], 200)))
    print(timeline)
    print(f"{speed:,.0f} tokens/s; loss {first:.2f} -> {last:.2f}, on unseen text {unseen:.2f}")
    if last >= 0.6 * first:
        sys.exit("the loss is not below 60 % of its first value")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=8, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--context", type=int, default=64, help="characters in a sequence")
    args = parser.parse_args()
    rpcpipe.run(train, args, stages=args.stages)
