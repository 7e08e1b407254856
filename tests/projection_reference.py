"""The projection of words, the n-gram attention of PRADO and the QRNN of pQRNN as loops over single numbers, for tests."""

import math

import numpy as np

MASK = 0xFFFFFFFF


def rotate(x, bits):
    return ((x << bits) | (x >> (32 - bits))) & MASK


def mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & MASK
    return x ^ (x >> 16)


def finish(h):
    """Adds the words, mixes each, and adds them again."""
    for again in (False, True):
        h[0] = sum(h) & MASK
        for i in (1, 2, 3):
            h[i] = (h[i] + h[0]) & MASK
        if not again:
            h = [mix(x) for x in h]
    return h


def murmur(data):
    """MurmurHash3_x86_128 of bytes, seed 0, after the published C++ code."""
    c = [0x239B961B, 0xAB0E9789, 0x38B34AE5, 0xA1E38B93]
    h = [0, 0, 0, 0]
    ends = [(19, 0x561CCD1B), (17, 0x0BCAA747), (15, 0x96CD1C35), (13, 0x32AC3B17)]
    for start in range(0, len(data) - 15, 16):
        for i in range(4):
            k = int.from_bytes(data[start + 4 * i : start + 4 * i + 4], "little")
            k = (rotate((k * c[i]) & MASK, 15 + i) * c[(i + 1) % 4]) & MASK
            turn, added = ends[i]
            h[i] = (rotate(h[i] ^ k, turn) + h[(i + 1) % 4]) & MASK
            h[i] = (h[i] * 5 + added) & MASK
    tail = data[len(data) // 16 * 16 :]
    for i in reversed(range(4)):
        part = tail[4 * i : 4 * i + 4]
        if part:
            k = sum(byte << (8 * place) for place, byte in enumerate(part))
            h[i] ^= (rotate((k * c[i]) & MASK, 15 + i) * c[(i + 1) % 4]) & MASK
    return finish([x ^ len(data) for x in h])


def features(hash_words, count):
    """The ternary features of a word, by a table of the two bits."""
    result = []
    for block in range(count // 64):
        state = [int(h) ^ ((4 * block + i + 1) * 0x9E3779B9 & MASK) for i, h in enumerate(hash_words)]
        for word in finish(state):
            result += [{0: 0, 1: 1, 2: -1, 3: 0}[word >> shift & 3] for shift in range(0, 32, 2)]
    return np.array(result)


def ngram_attention(values, logits, length, offsets, value_kernel, value_bias, logit_kernel, logit_bias):
    """The vector of one text: for each channel, the softmax over the text's positions weights the values of the n-grams."""
    channels = value_kernel.shape[1]
    result = np.zeros(channels)
    for channel in range(channels):
        scored = []
        for t in range(length):
            inside = [(tap, t + offset) for tap, offset in enumerate(offsets) if t + offset < length]
            size = values.shape[1]
            value, logit = value_bias[channel], logit_bias[channel]
            for tap, place in inside:
                rows = slice(tap * size, (tap + 1) * size)
                value += values[place] @ value_kernel[rows, channel]
                logit += logits[place] @ logit_kernel[rows, channel]
            scored.append((logit, value))
        total = sum(math.exp(logit) for logit, _ in scored)
        result[channel] = sum(math.exp(logit) / total * value for logit, value in scored)
    return result


def qrnn(x, kernel, bias, width, hold):
    """fo-pooling of one sequence, as in evaluation: the share `hold` of the state stays."""
    size = kernel.shape[1] // 3
    c, out = np.zeros(size), []
    for t in range(len(x)):
        taps = [x[t - tap] if t >= tap else np.zeros(x.shape[1]) for tap in range(width)]
        z, f, o = np.split(np.concatenate(taps) @ kernel + bias, 3)
        z, f, o = np.tanh(z), 1 / (1 + np.exp(-f)), 1 / (1 + np.exp(-o))
        c = hold * c + (1 - hold) * (f * c + (1 - f) * z)
        out.append(o * c)
    return np.array(out)
