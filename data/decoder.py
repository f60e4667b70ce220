"""A decoder model of a GGUF file (architecture llama or gemma3), run by numpy in float32.

Linear layers and attention are cut into jobs of fixed size that run on a pool of threads, so the
result does not depend on their number. NumPy's own threads are switched off for that.
"""
import os
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"      # before numpy is loaded

import math
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import tokenizers

KEY_BLOCK = 1024       # keys per step of the attention walk
ROW_BLOCK = 1024       # packed rows per attention job, positions per job elsewhere
LOGIT_BLOCK = 256      # positions whose logits are held at a time
GEMMA_LOCAL_BASE = 10000.0      # RoPE base of Gemma 3's sliding-window layers; not in the file
GEMMA_GLOBAL_EVERY = 6          # one layer in six sees everything


class Bad(Exception):
    """The caller's mistake: one line that names what was found and what was expected."""


# ------------------------------------------------------------------------------- threads

class Pool:
    """Runs independent jobs on all cores (numpy lets go of the interpreter inside its loops)."""

    def __init__(self, threads):
        self.executor = ThreadPoolExecutor(threads)

    def each(self, job, items):
        for future in [self.executor.submit(job, item) for item in items]:
            future.result()

    def rows(self, job, count):
        """job(first, last) over all positions, in blocks."""
        self.each(lambda i: job(i, min(i + ROW_BLOCK, count)), range(0, count, ROW_BLOCK))


# --------------------------------------------------------------------------------- model

class Model:
    """Weights and hyperparameters of a GGUF file of the architecture llama or gemma3."""

    def __init__(self, path):
        try:
            self.reader = gguf.GGUFReader(path)
        except (OSError, ValueError) as error:
            raise Bad(f"{path}: not a readable GGUF file: {error}") from None
        self.arch = self.field("general.architecture")
        if self.arch not in ("llama", "gemma3"):
            raise Bad(f"{path}: architecture {self.arch!r}; expected llama or gemma3")
        self.tensors = {t.name: t for t in self.reader.tensors}
        get = lambda name, default=None: self.field(f"{self.arch}.{name}", default)
        self.layers = get("block_count")
        self.width = get("embedding_length")
        self.heads = get("attention.head_count")
        self.kv_heads = get("attention.head_count_kv", self.heads)
        self.head_dim = get("attention.key_length", self.width // self.heads)
        self.norm_eps = get("attention.layer_norm_rms_epsilon")
        self.trained = get("context_length")
        self.rope_base = get("rope.freq_base", 10000.0)
        self.window = get("attention.sliding_window", 0)
        self.gemma = self.arch == "gemma3"
        if self.heads % self.kv_heads:
            raise Bad(f"{path}: {self.heads} query heads over {self.kv_heads} key heads")
        self.group = self.heads // self.kv_heads
        self.embedding = self.weight("token_embd.weight")
        self.unembedding = self.weight("output.weight") if "output.weight" in self.tensors else self.embedding

    def field(self, key, default=None):
        found = self.reader.get_field(key)
        if found is None:
            if default is None:
                raise Bad(f"the GGUF file has no field {key}")
            return default
        return found.contents()

    def weight(self, name):
        """A tensor as float32, matrices as [out][in]."""
        if name not in self.tensors:
            raise Bad(f"the GGUF file has no tensor {name}")
        tensor = self.tensors[name]
        return np.ascontiguousarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)

    def projection(self, layer, name):
        """Wq or Wk in the order of the published model: channels c and c + hd/2 rotate together.

        The llama conversion to GGUF reorders the rows so that neighbours 2i and 2i + 1 do;
        gemma3 files keep the published order."""
        weight = self.weight(f"blk.{layer}.{name}.weight")
        if self.arch == "llama":
            heads = weight.shape[0] // self.head_dim
            pairs = weight.reshape(heads, self.head_dim // 2, 2, -1)
            weight = np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
        return weight

    def is_local(self, layer):
        return self.gemma and self.window > 0 and layer % GEMMA_GLOBAL_EVERY != GEMMA_GLOBAL_EVERY - 1

    def byte_level_tokenizer(self, tokens):
        pre = self.field("tokenizer.ggml.pre")
        if pre != "smollm":
            raise Bad(f"tokenizer.ggml.pre is {pre!r}; expected smollm")
        merges = [tuple(m.split(" ")) for m in self.field("tokenizer.ggml.merges")]
        result = tokenizers.Tokenizer(tokenizers.models.BPE(
            vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        parts = tokenizers.pre_tokenizers
        result.pre_tokenizer = parts.Sequence([
            parts.Digits(individual_digits=True),
            parts.ByteLevel(add_prefix_space=False, use_regex=True)])
        return result

    def sentencepiece_tokenizer(self, tokens):
        """SentencePiece joins the neighbours whose union has the best score: every split of a token
        into two is a merge, ranked by that score. Tokens of type 4 are cut out of the text first."""
        types, scores = self.field("tokenizer.ggml.token_type"), self.field("tokenizer.ggml.scores")
        vocab = {t: i for i, t in enumerate(tokens)}
        plain = sorted((i for i, t in enumerate(types) if t == 1), key=lambda i: -scores[i])
        merges = [(t[:cut], t[cut:]) for t in (tokens[i] for i in plain)
                  for cut in range(1, len(t)) if t[:cut] in vocab and t[cut:] in vocab]
        result = tokenizers.Tokenizer(tokenizers.models.BPE(
            vocab=vocab, merges=merges, byte_fallback=True, fuse_unk=True,
            unk_token=tokens[self.field("tokenizer.ggml.unknown_token_id")]))
        result.normalizer = tokenizers.normalizers.Replace(" ", "\u2581")
        result.add_tokens([tokenizers.AddedToken(tokens[i], normalized=True) for i, t in enumerate(types) if t == 4])
        return result

    def encode(self, text):
        """The token that begins a text, if the model wants one, and the tokens of the text."""
        makers = {"gpt2": self.byte_level_tokenizer, "llama": self.sentencepiece_tokenizer}
        kind = self.field("tokenizer.ggml.model")
        if kind not in makers:
            raise Bad(f"tokenizer.ggml.model is {kind!r}; expected one of {', '.join(makers)}")
        ids = makers[kind](self.field("tokenizer.ggml.tokens")).encode(text, add_special_tokens=False).ids
        begin = [self.field("tokenizer.ggml.bos_token_id")] if self.field("tokenizer.ggml.add_bos_token", False) else []
        return begin, ids


# ---------------------------------------------------------------------------------- RoPE

def rope_frequencies(dim, base, method, factor, trained):
    """Radians per position for each channel pair, and the factor on cos and sin.

    ntk    raises the base so that the slowest pair is slowed by `factor` and the fastest stays.
    linear divides all the positions by `factor`.
    yarn   divides only the pairs that turn less than once within the trained length, leaves those
           that turn more than 32 times, blends between, and sharpens the softmax a little."""
    pair = np.arange(0, dim, 2) / dim
    if factor <= 1 or method == "none":
        return base ** -pair, 1.0
    if method == "ntk":
        return (base * factor ** (dim / (dim - 2))) ** -pair, 1.0
    if method == "linear":
        return base ** -pair / factor, 1.0
    frequency = base ** -pair
    at = lambda turns: dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))
    low, high = max(math.floor(at(32)), 0), min(math.ceil(at(1)), dim - 1)
    keep = 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return frequency * (keep + (1 - keep) / factor), 0.1 * math.log(factor) + 1


def rotary_tables(length, frequencies, amplitude):
    angle = np.outer(np.arange(length, dtype=np.float64), frequencies)
    return ((np.cos(angle) * amplitude).astype(np.float32)[:, None, :],
            (np.sin(angle) * amplitude).astype(np.float32)[:, None, :])


def rotate(x, cos, sin):
    """Turns channels c and c + hd/2 of x[positions][heads][hd] in place."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].copy(), x[..., half:].copy()
    x[..., :half] = a * cos - b * sin
    x[..., half:] = b * cos + a * sin


# ----------------------------------------------------------------------------- attention

def attend_block(q, k, v, out, first, last, scale, window):
    """Causal attention of the positions first..last-1 over one KV head, its heads packed.

    q[n][group][hd], k[n][hd], v[n][hd]; the softmax runs over key blocks with a running maximum."""
    group, dim = q.shape[1:]
    rows = (q[first:last] * np.float32(scale)).reshape(-1, dim)
    position = np.repeat(np.arange(first, last), group)[:, None]
    top = np.full((len(rows), 1), -np.inf, np.float32)
    mass = np.zeros((len(rows), 1), np.float32)
    total = np.zeros((len(rows), dim), np.float32)
    begin = max(0, first - window + 1) if window else 0
    for low in range(begin, last, KEY_BLOCK):
        high = min(low + KEY_BLOCK, last)
        score = rows @ k[low:high].T
        if high - 1 > first or (window and low <= last - 1 - window):
            key = np.arange(low, high)
            hidden = key > position
            if window:
                hidden |= key <= position - window
            score[hidden] = -np.inf
        rise = np.maximum(top, score.max(1, keepdims=True))
        frame = np.where(np.isfinite(rise), rise, np.float32(0))     # no key seen yet: stay at zero
        keep = np.exp(top - frame)
        score -= frame
        np.exp(score, out=score)
        mass = mass * keep + score.sum(1, keepdims=True)
        total = total * keep + score @ v[low:high]
        top = rise
    out[first:last] = (total / mass).reshape(last - first, group, dim)


def attention(pool, model, q, k, v, window):
    length, scale = len(k), 1 / math.sqrt(model.head_dim)
    out = np.empty_like(q)
    step = max(1, ROW_BLOCK // model.group)
    heads = []
    for head in range(model.kv_heads):
        own = slice(head * model.group, (head + 1) * model.group)
        heads.append((q[:, own], np.ascontiguousarray(k[:, head]), np.ascontiguousarray(v[:, head]), out[:, own]))
    jobs = [(low, head) for low in reversed(range(0, length, step)) for head in range(model.kv_heads)]

    def job(item):
        low, head = item
        attend_block(*heads[head], low, min(low + step, length), scale, window)
    pool.each(job, jobs)
    return out


# --------------------------------------------------------------------------- forward pass

def rms_norm(x, weight, eps):
    return x * (weight / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + np.float32(eps)))


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x ** 3)))


class Layer:
    """The weights of one layer, and its two halves around the attention."""

    def __init__(self, model, index):
        weight = lambda name: model.weight(f"blk.{index}.{name}.weight")
        self.model, self.index, self.local = model, index, model.is_local(index)
        self.norm, self.ffn_norm = weight("attn_norm"), weight("ffn_norm")
        self.wq, self.wk = model.projection(index, "attn_q"), model.projection(index, "attn_k")
        self.wv, self.wo = weight("attn_v"), weight("attn_output")
        self.gate, self.up, self.down = weight("ffn_gate"), weight("ffn_up"), weight("ffn_down")
        if model.gemma:
            self.q_norm, self.k_norm = weight("attn_q_norm"), weight("attn_k_norm")
            self.after_attn, self.after_ffn = weight("post_attention_norm"), weight("post_ffw_norm")

    def project(self, pool, x, tables):
        """Q, K, V as [n][heads][hd], Q and K rotated."""
        model, length, (cos, sin) = self.model, len(x), tables[self.local]
        q = np.empty((length, model.heads, model.head_dim), np.float32)
        k = np.empty((length, model.kv_heads, model.head_dim), np.float32)
        v = np.empty_like(k)

        def job(low, high):
            own = slice(low, high)
            h = rms_norm(x[own], self.norm, model.norm_eps)
            for array, weight in ((q, self.wq), (k, self.wk), (v, self.wv)):
                array[own] = (h @ weight.T).reshape(array[own].shape)
            if model.gemma:
                q[own] = rms_norm(q[own], self.q_norm, model.norm_eps)
                k[own] = rms_norm(k[own], self.k_norm, model.norm_eps)
            rotate(q[own], cos[own], sin[own])
            rotate(k[own], cos[own], sin[own])
        pool.rows(job, length)
        return q, k, v

    def finish(self, pool, x, o):
        """Adds the attention output and the feed-forward part to x."""
        eps, gemma = self.model.norm_eps, self.model.gemma
        act = gelu if gemma else silu

        def job(low, high):
            h = o[low:high].reshape(high - low, -1) @ self.wo.T
            x[low:high] += rms_norm(h, self.after_attn, eps) if gemma else h
            h = rms_norm(x[low:high], self.ffn_norm, eps)
            h = (act(h @ self.gate.T) * (h @ self.up.T)) @ self.down.T
            x[low:high] += rms_norm(h, self.after_ffn, eps) if gemma else h
        pool.rows(job, len(x))


def losses(pool, model, x, tokens):
    """Natural-log loss of predicting tokens[1:] from the last layer's x."""
    loss = np.empty(len(tokens) - 1, np.float32)
    norm = model.weight("output_norm.weight")

    def job(low, high):
        for a in range(low, high, LOGIT_BLOCK):
            b = min(a + LOGIT_BLOCK, high)
            logits = rms_norm(x[a:b], norm, model.norm_eps) @ model.unembedding.T
            top = logits.max(1, keepdims=True)
            right = logits[np.arange(b - a), tokens[a + 1:b + 1]]
            loss[a:b] = np.log(np.exp(logits - top).sum(1)) + top[:, 0] - right
    pool.rows(job, len(loss))
    return loss


def forward(pool, model, tokens, extension, factor, visit):
    """Runs all the layers, calls visit(layer, q, k, v) for each, and returns the losses."""
    dim, length = model.head_dim, len(tokens)
    x = model.embedding[tokens].copy()
    if model.gemma:
        x *= np.float32(math.sqrt(model.width))
    tables = {
        False: rotary_tables(length, *rope_frequencies(dim, model.rope_base, extension, factor, model.trained)),
        True: rotary_tables(length, *rope_frequencies(dim, GEMMA_LOCAL_BASE, "none", 1, model.trained)),
    }
    for index in range(model.layers):
        layer = Layer(model, index)
        q, k, v = layer.project(pool, x, tables)
        visit(index, q, k, v)
        layer.finish(pool, x, attention(pool, model, q, k, v, model.window if layer.local else 0))
    return losses(pool, model, x, tokens)
