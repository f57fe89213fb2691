// One forward pass of llama.py on a CPU: weights are read once for all tokens of a pass, activations are float32.
//
// Every sum is formed in an order that does not depend on how many tokens a pass has or which rows share it: the same
// text gives the same bits at every width and in every batch. GCC's and Clang's vector types make it portable.
//
// N tokens of a pass (rows times T), D hidden, H query heads, K kv heads, C head_dim, F ffn, V vocab, S cached tokens.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16, ROWS = 4, TOKENS = 6;  // a tile of 4 outputs and 6 tokens fits 32 vector registers
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

struct bf16 { uint16_t bits; };

inline floats load(const float* p) { floats v; std::memcpy(&v, p, sizeof v); return v; }
#ifdef __AVX512F__  // GCC 12 widens in four parts what is one instruction
inline floats load(const bf16* p) {
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return (floats)_mm512_slli_epi32(w, 16);
}
inline floats load(const int8_t* p) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#else
inline floats load(const bf16* p) {
    halves v;
    std::memcpy(&v, p, sizeof v);
    const words w = __builtin_convertvector(v, words) << 16;
    return (floats)w;
}
inline floats load(const int8_t* p) {
    bytes v;
    std::memcpy(&v, p, sizeof v);
    return __builtin_convertvector(__builtin_convertvector(v, ints), floats);
}
#endif

inline float one(float x) { return x; }
inline float one(int8_t x) { return x; }
inline float one(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {  // to the nearest, of a tie the even one
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// exp by Cephes' polynomial, to 2 units in the last place; 0 below -87
inline floats exp(floats x) {
    const floats low = {}, least = low - 87.f, most = low + 88.f;
    const auto none = x < least;
    x = none ? least : x > most ? most : x;
    const floats magic = low + 12582912.f;  // 1.5 * 2^23: adding it rounds to a whole number
    const floats n = (x * 1.44269504f + magic) - magic;
    const floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    floats y = low + 1.9875691500e-4f;
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = y * r + c;
    y = y * (r * r) + r + 1.f;
    const words power = __builtin_convertvector(__builtin_convertvector(n, ints) + 127, words) << 23;
    return none ? low : y * (floats)power;
}

inline float sum(floats v) {
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
}

template <class A>
inline float dot(const float* x, const A* w, int n) {
    floats acc = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) acc += load(x + i) * load(w + i);
    float rest = 0;
    for (; i < n; i++) rest += x[i] * one(w[i]);
    return sum(acc) + rest;
}

// R outputs of T tokens; w [R, in], x [T, in], y [T, out]
template <int R, int T, class W>
inline void tile(const W* w, const float* x, int in, float* y, int out, const float* scale, const float* bias) {
    floats acc[R][T] = {};
    int i = 0;
    for (; i + LANES <= in; i += LANES) {
        floats a[R];
        for (int r = 0; r < R; r++) {
            __builtin_prefetch(w + size_t(r + R) * in + i);  // rows are short: the hardware would lose the track
            a[r] = load(w + size_t(r) * in + i);
        }
        for (int t = 0; t < T; t++) {
            const floats b = load(x + size_t(t) * in + i);
            for (int r = 0; r < R; r++) acc[r][t] += a[r] * b;
        }
    }
    for (int t = 0; t < T; t++)
        for (int r = 0; r < R; r++) {
            float rest = 0;
            for (int j = i; j < in; j++) rest += one(w[size_t(r) * in + j]) * x[size_t(t) * in + j];
            y[size_t(t) * out + r] = (sum(acc[r][t]) + rest) * (scale ? scale[r] : 1.f) + (bias ? bias[r] : 0.f);
        }
}

template <int R, class W>
void tiles(const W* w, const float* x, int tokens, int in, float* y, int out, const float* scale, const float* bias) {
    const int parts = (tokens + TOKENS - 1) / TOKENS, each = (tokens + parts - 1) / parts;  // 8 is 4 and 4, not 6 and 2
    for (int t = 0; t < tokens; t += each) {
        const float* a = x + size_t(t) * in;
        float* b = y + size_t(t) * out;
        switch (std::min(each, tokens - t)) {
            case 1: tile<R, 1>(w, a, in, b, out, scale, bias); break;
            case 2: tile<R, 2>(w, a, in, b, out, scale, bias); break;
            case 3: tile<R, 3>(w, a, in, b, out, scale, bias); break;
            case 4: tile<R, 4>(w, a, in, b, out, scale, bias); break;
            case 5: tile<R, 5>(w, a, in, b, out, scale, bias); break;
            default: tile<R, 6>(w, a, in, b, out, scale, bias);
        }
    }
}

struct Matrix { const void* weights; const float* scale; const float* bias; };  // scale: of each output, or null

// y [tokens, out] = x [tokens, in] W^T
template <class W>
void linear(const Matrix& m, const float* x, int tokens, int in, float* y, int out) {
    const W* w = static_cast<const W*>(m.weights);
#pragma omp for schedule(static)
    for (int o = 0; o < out / ROWS; o++) {
        const int at = o * ROWS;
        tiles<ROWS>(w + size_t(at) * in, x, tokens, in, y + at, out, m.scale ? m.scale + at : nullptr,
                    m.bias ? m.bias + at : nullptr);
    }
#pragma omp for schedule(static)
    for (int o = out / ROWS * ROWS; o < out; o++)
        tiles<1>(w + size_t(o) * in, x, tokens, in, y + o, out, m.scale ? m.scale + o : nullptr,
                 m.bias ? m.bias + o : nullptr);
}

void norm(const float* x, const float* w, int n, float eps, float* y) {
    const float scale = 1.f / std::sqrt(dot(x, x, n) / n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

}  // namespace

extern "C" {

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
};

struct Model {
    int layers, hidden, heads, kv_heads, head_dim, ffn, vocab, threads;
    float eps;
    const void* embed;
    const float *norm, *cos, *sin;  // tables [context, C], the sine's sign as in llama.py
    Matrix head;
    const Layer* layer;
};

// Caches are [layers, rows, K, capacity, C].
struct Pass {
    int rows, width, last, capacity;
    const int64_t *ids, *used, *depth;  // [rows, T]; [rows]; [T] or null: a chain
    const uint8_t* sees;                // [T, T] or null: a chain
    void *keys, *values;
    float* logits;  // [rows, last, V]
};

}  // extern "C"

namespace {

// One head of one token: softmax over what it sees of the row's cache.
template <class KV>
void attend(const Pass& p, int row, int t, int C, const float* q, const KV* keys, const KV* values, float* scores,
            float* out) {
    const int used = int(p.used[row]), end = used + (p.sees ? p.width : t + 1);
    const float scale = 1.f / std::sqrt(float(C));
    float most = -INFINITY;
    for (int s = 0; s < end; s++) {
        const bool seen = s < used || !p.sees || p.sees[t * p.width + s - used];
        scores[s] = seen ? dot(q, keys + size_t(s) * C, C) * scale : -INFINITY;
        most = std::max(most, scores[s]);
    }
    floats total = {};
    std::fill(scores + end, scores + (end + LANES - 1) / LANES * LANES, -INFINITY);
    for (int s = 0; s < end; s += LANES) {
        const floats weights = exp(load(scores + s) - most);
        std::memcpy(scores + s, &weights, sizeof weights);
        total += weights;
    }
    std::fill(out, out + C, 0.f);
    for (int s = 0; s < end; s++) {
        const float weight = scores[s];
        if (weight == 0) continue;
        const KV* v = values + size_t(s) * C;
        int i = 0;
        for (; i + LANES <= C; i += LANES) {
            const floats sum = load(out + i) + weight * load(v + i);
            std::memcpy(out + i, &sum, sizeof sum);
        }
        for (; i < C; i++) out[i] += weight * one(v[i]);
    }
    const float all = sum(total);
    for (int i = 0; i < C; i++) out[i] /= all;
}

template <class W, class KV>
void run(const Model& m, const Pass& p) {
    const int D = m.hidden, H = m.heads, K = m.kv_heads, C = m.head_dim, F = m.ffn, T = p.width, N = p.rows * T;
    const int QKV = (H + 2 * K) * C;
    std::vector<float> x(size_t(N) * D), h(size_t(N) * D), qkv(size_t(N) * QKV), mixed(size_t(N) * H * C);
    std::vector<float> both(size_t(N) * 2 * F), inner(size_t(N) * F);
    const int64_t furthest = *std::max_element(p.used, p.used + p.rows) + T;
    const size_t slab = size_t(K) * p.capacity * C;  // of one row and layer
    for (int n = 0; n < N; n++)
        for (int i = 0; i < D; i++) x[size_t(n) * D + i] = one(static_cast<const KV*>(m.embed)[p.ids[n] * D + i]);
#pragma omp parallel num_threads(m.threads) if (m.threads > 1)
    {
        std::vector<float> scores(furthest + LANES);
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) norm(&x[size_t(n) * D], layer.input_norm, D, m.eps, &h[size_t(n) * D]);
            linear<W>(layer.qkv, h.data(), N, D, qkv.data(), QKV);
#pragma omp for schedule(static)
            for (int g = 0; g < N * (H + K); g++) {  // rotate queries and keys; keys and values go to the cache
                const int n = g / (H + K), head = g % (H + K), row = n / T, t = n % T;
                float* v = &qkv[size_t(n) * QKV + head * C];
                const float* own = head < H ? layer.q_norm : layer.k_norm;
                if (own) norm(v, own, C, m.eps, v);
                const int64_t at = p.used[row] + (p.depth ? p.depth[t] : t);
                const float *cos = m.cos + at * C, *sin = m.sin + at * C;
                for (int i = 0; i < C / 2; i++) {
                    const float a = v[i], b = v[i + C / 2];
                    v[i] = a * cos[i] + b * sin[i];
                    v[i + C / 2] = b * cos[i + C / 2] + a * sin[i + C / 2];
                }
                if (head < H) continue;
                const size_t slot = (size_t(l) * p.rows + row) * slab + (size_t(head - H) * p.capacity + p.used[row] + t) * C;
                KV *k = static_cast<KV*>(p.keys) + slot, *w = static_cast<KV*>(p.values) + slot;
                for (int i = 0; i < C; i++) put(k[i], v[i]), put(w[i], v[K * C + i]);
            }
#pragma omp for schedule(static)
            for (int g = 0; g < N * H; g++) {
                const int n = g / H, head = g % H, row = n / T;
                const size_t slot = (size_t(l) * p.rows + row) * slab + size_t(head / (H / K)) * p.capacity * C;
                attend(p, row, n % T, C, &qkv[size_t(n) * QKV + head * C], static_cast<KV*>(p.keys) + slot,
                       static_cast<KV*>(p.values) + slot, scores.data(), &mixed[size_t(g) * C]);
            }
            linear<W>(layer.o, mixed.data(), N, H * C, h.data(), D);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                float *a = &x[size_t(n) * D], *b = &h[size_t(n) * D];
                for (int i = 0; i < D; i++) a[i] += b[i];
                norm(a, layer.post_norm, D, m.eps, b);
            }
            linear<W>(layer.gate_up, h.data(), N, D, both.data(), 2 * F);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                const float *gate = &both[size_t(n) * 2 * F], *up = gate + F;
                float* to = &inner[size_t(n) * F];
                for (int i = 0; i < F; i += LANES) {
                    const int count = std::min(LANES, F - i);
                    floats a = {}, b = {};
                    std::memcpy(&a, gate + i, 4 * count);
                    std::memcpy(&b, up + i, 4 * count);
                    a = a / (1.f + exp(-a)) * b;
                    std::memcpy(to + i, &a, 4 * count);
                }
            }
            linear<W>(layer.down, inner.data(), N, F, h.data(), D);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++)
                for (int i = 0; i < D; i++) x[size_t(n) * D + i] += h[size_t(n) * D + i];
        }
#pragma omp for schedule(static)
        for (int n = 0; n < p.rows * p.last; n++) {
            const int token = n / p.last * T + T - p.last + n % p.last;
            norm(&x[size_t(token) * D], m.norm, D, m.eps, &h[size_t(n) * D]);
        }
        linear<W>(m.head, h.data(), p.rows * p.last, D, p.logits, m.vocab);
    }
}

}  // namespace

extern "C" {
void run_float32(const Model* m, const Pass* p) { run<float, float>(*m, *p); }
void run_bfloat16(const Model* m, const Pass* p) { run<bf16, bf16>(*m, *p); }
void run_int8_float32(const Model* m, const Pass* p) { run<int8_t, float>(*m, *p); }
void run_int8_bfloat16(const Model* m, const Pass* p) { run<int8_t, bf16>(*m, *p); }
}
