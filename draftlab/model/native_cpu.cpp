// One forward pass of llama.py on a CPU. Weights are read once for all tokens of a pass, and activations are float32.
// For a bfloat16 model, if the processor can multiply bfloat16 or int16, activations are rounded to one of these before
// they are multiplied by weights or cached values.
//
// The order of every sum depends neither on the number of tokens in a pass nor on the rows of the batch, so that the
// same text gives the same bits at every width and in every batch. Products are fused with sums only where this file
// says so. The compiler might fuse differently at different widths, so -ffp-contract=off forbids it. The file uses the
// vector types of GCC and Clang, and so is portable between processors.
//
// N tokens of a pass (rows times T), D hidden, H query heads, K KV heads, G query heads per KV head, C head_dim, F ffn,
// V vocab, S cached tokens, A layers whose states a drafter reads, E ids of a trimmed LM head.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define PAIRS  // one instruction multiplies 32 pairs of bfloat16 or int16 and adds every two products
#endif
#if defined(PAIRS) && defined(__AMX_BF16__) && defined(__linux__)
#define MATRIX_TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// LANES: floats in a vector of the processor. A tile of ROWS outputs and TOKENS tokens fits into its registers.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 4, TOKENS = 6;  // 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 2, TOKENS = 6;  // 16 registers
#elif defined(__ARM_NEON)
constexpr int LANES = 4, ROWS = 4, TOKENS = 6;  // 32 registers
#else
constexpr int LANES = 4, ROWS = 2, TOKENS = 6;  // 16 registers
#endif
constexpr int BLOCK = 20 * TOKENS;  // tokens whose activations stay in the L2 cache while the weights are read
typedef float floats __attribute__((vector_size(4 * LANES)));

// Allocates memory that begins with a cache line. Otherwise, with some addresses from malloc, every load of activations
// reads from two cache lines. Such passes took up to 1.7 times as long.
template <class T>
struct CacheLines {
    using value_type = T;
    CacheLines() = default;
    template <class U>
    CacheLines(const CacheLines<U>&) {}
    T* allocate(size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64))); }
    void deallocate(T* memory, size_t) { ::operator delete(memory, std::align_val_t(64)); }
    template <class U>
    bool operator==(const CacheLines<U>&) const { return true; }
    template <class U>
    bool operator!=(const CacheLines<U>&) const { return false; }
};
template <class T>
using Buffer = std::vector<T, CacheLines<T>>;
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES)));

// Returns the number of weights from a load to the weights that it prefetches: those of the tile after the next one, but
// at least 8 KB, because rows may be so short that the next tile begins before memory has answered.
template <class W>
inline size_t ahead(int rows, int in) { return std::max(size_t(2 * rows) * in, 8192 / sizeof(W)); }

// Unrolls a loop completely. Otherwise an array of sums would be in memory, not in registers.
#define UNROLL _Pragma("GCC unroll 64")

struct bf16 { uint16_t bits; };

inline void store(float* to, floats v) { std::memcpy(to, &v, sizeof v); }
inline floats load(const float* p) { floats v; std::memcpy(&v, p, sizeof v); return v; }
#ifdef __AVX512F__  // intrinsics, because GCC 12 splits these conversions into several instructions
inline floats load(const bf16* p) {
    const __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return (floats)_mm512_slli_epi32(w, 16);
}
inline floats load(const int8_t* p) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
inline floats load(const bf16* p) {
    const __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return (floats)_mm256_slli_epi32(w, 16);
}
inline floats load(const int8_t* p) {
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
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

// Loads the first `count` elements of a vector, then zeros. A scalar loop over these elements could round differently.
template <class A>
inline floats load(const A* p, int count) {
    A part[LANES] = {};
    std::copy(p, p + count, part);
    return load(part);
}

inline float one(float x) { return x; }
inline float one(int8_t x) { return x; }
inline float one(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) {  // rounds to the nearest, and ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// a * b + c, rounded once where the processor can
inline floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// exp by Cephes' polynomial, with an error of at most 2 units in the last place; 0 below -87
inline floats exp(floats x) {
    const floats low = {}, least = low - 87.f, most = low + 88.f;
    const auto none = x < least;
    x = none ? least : x > most ? most : x;
    const floats magic = low + 12582912.f;  // 1.5 * 2^23: adding this number rounds to a whole number
    const floats n = fused(x, low + 1.44269504f, magic) - magic;
    const floats r = fused(n, low + 2.12194440e-4f, fused(n, low - 0.693359375f, x));
    floats y = low + 1.9875691500e-4f;
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        y = fused(y, r, low + c);
    y = fused(y, r * r, r) + 1.f;
    const words power = __builtin_convertvector(__builtin_convertvector(n, ints) + 127, words) << 23;
    return none ? low : y * (floats)power;
}

inline float sum(floats v) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)v);
#else
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) v[i] += v[i + step];
    return v[0];
#endif
}

template <class A>
inline float dot(const float* x, const A* w, int n) {
    floats acc = {};
    int i = 0;
    for (; i + LANES <= n; i += LANES) acc = fused(load(x + i), load(w + i), acc);
    if (i < n) acc = fused(load(x + i, n - i), load(w + i, n - i), acc);
    return sum(acc);
}

// Computes R outputs of T tokens: y = x w^T * scale + bias. w [R, in], x [T, in], y [T, out].
template <int R, int T, class W>
inline void tile(const W* w, const float* x, int in, float* y, int out, const float* scale, const float* bias) {
    floats acc[R][T] = {};
    int i = 0;
    for (; i + LANES <= in; i += LANES) {
        floats a[R];
        UNROLL for (int r = 0; r < R; r++) {
            if (i % 16 == 0)  // rows are too short for the hardware's prefetcher
                __builtin_prefetch(w + size_t(r) * in + i + ahead<W>(R, in));
            a[r] = load(w + size_t(r) * in + i);
        }
        UNROLL for (int t = 0; t < T; t++) {
            const floats b = load(x + size_t(t) * in + i);
            UNROLL for (int r = 0; r < R; r++) acc[r][t] = fused(a[r], b, acc[r][t]);
        }
    }
    if (i < in)
        UNROLL for (int r = 0; r < R; r++) {
            const floats a = load(w + size_t(r) * in + i, in - i);
            UNROLL for (int t = 0; t < T; t++) acc[r][t] = fused(a, load(x + size_t(t) * in + i, in - i), acc[r][t]);
        }
    UNROLL for (int t = 0; t < T; t++)
        UNROLL for (int r = 0; r < R; r++)
            y[size_t(t) * out + r] = sum(acc[r][t]) * (scale ? scale[r] : 1.f) + (bias ? bias[r] : 0.f);
}

#ifdef PAIRS
constexpr int PAIRED = 32;

inline __m512i pairs(const bf16* p, __mmask32 m) { return _mm512_maskz_loadu_epi16(m, p); }
inline __m512i pairs(const int16_t* p, __mmask32 m) { return _mm512_maskz_loadu_epi16(m, p); }
inline __m512i pairs(const int8_t* p, __mmask32 m) { return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(m, p)); }
inline void add(floats& to, __m512i a, __m512i b) {
    to = (floats)_mm512_dpbf16_ps((__m512)to, (__m512bh)a, (__m512bh)b);
}
inline void add(ints& to, __m512i a, __m512i b) { to = (ints)_mm512_dpwssd_epi32((__m512i)to, a, b); }
inline __m512 as_floats(floats v) { return (__m512)v; }
inline __m512 as_floats(ints v) { return _mm512_cvtepi32_ps((__m512i)v); }

// Sums each of four vectors, all in the same order of additions.
inline __m128 sums(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512d ab = (__m512d)(_mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b));
    const __m512d cd = (__m512d)(_mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d));
    const __m512 all = (__m512)_mm512_unpacklo_pd(ab, cd) + (__m512)_mm512_unpackhi_pd(ab, cd);
    const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

// Sums of products of activations X
template <class X>
using Sum = std::conditional_t<std::is_same_v<X, bf16>, floats, ints>;

// Adds the products of the inputs `from` to `to` to sums of R outputs and T tokens. Calls prefetch(i, r) before a load.
template <int R, int T, class W, class X, class F>
inline void add_pairs(const W* w, const X* x, int in, int from, int to, Sum<X> (&acc)[4][T], F prefetch) {
    for (int i = from; i < to; i += PAIRED) {
        const __mmask32 mask = i + PAIRED <= to ? ~0u : (1u << (to - i)) - 1;
        __m512i a[R];
        UNROLL for (int r = 0; r < R; r++) {
            prefetch(i, r);
            a[r] = pairs(w + size_t(r) * in + i, mask);
        }
        UNROLL for (int t = 0; t < T; t++) {
            const __m512i b = pairs(x + size_t(t) * in + i, mask);
            UNROLL for (int r = 0; r < R; r++) add(acc[r][t], a[r], b);
        }
    }
}

// Writes R outputs of T tokens from their sums. steps: Step of each token's int16 values, or null for bfloat16.
template <int R, int T, class S>
inline void write_outputs(const S (&acc)[4][T], const float* steps, float* y, int out, const float* scale,
                          const float* bias) {
    const __mmask8 rows = (1 << R) - 1;
    const __m128 by = scale ? _mm_maskz_loadu_ps(rows, scale) : _mm_set1_ps(1);
    const __m128 plus = bias ? _mm_maskz_loadu_ps(rows, bias) : _mm_setzero_ps();
    UNROLL for (int t = 0; t < T; t++) {
        const __m128 all = sums(as_floats(acc[0][t]), as_floats(acc[1][t]), as_floats(acc[2][t]), as_floats(acc[3][t]));
        _mm_mask_storeu_ps(y + size_t(t) * out, rows, all * (steps ? by * steps[t] : by) + plus);
    }
}

// Does the same as tile for rounded activations.
template <int R, int T, class W, class X>
inline void pair_tile(const W* w, const X* x, const float* steps, int in, float* y, int out, const float* scale,
                      const float* bias) {
    Sum<X> acc[4][T] = {};
    add_pairs<R, T>(w, x, in, 0, in, acc, [&](int i, int r) {
        __builtin_prefetch(w + ahead<W>(R, in) + i * R + r * PAIRED);  // in the order of addresses, not of use
    });
    write_outputs<R, T>(acc, steps, y, out, scale, bias);
}
#endif

// The dtype to which activations are rounded, for weights W of a model with dtype D
template <class W, class D>
struct Meeting { using type = float; };
#ifdef PAIRS
template <>
struct Meeting<bf16, bf16> { using type = bf16; };
template <>
struct Meeting<int8_t, bf16> { using type = int16_t; };
#endif

// Calls f with `count` as a compile-time constant.
template <class F>
inline void unrolled(int count, F f) {
    switch (count) {
        case 1: f(std::integral_constant<int, 1>()); break;
        case 2: f(std::integral_constant<int, 2>()); break;
        case 3: f(std::integral_constant<int, 3>()); break;
        case 4: f(std::integral_constant<int, 4>()); break;
        case 5: f(std::integral_constant<int, 5>()); break;
        default: f(std::integral_constant<int, TOKENS>());
    }
}

inline int evenly(int tokens) {  // size of tiles that divide the tokens evenly: 8 is 4 and 4, not 6 and 2
    const int parts = (tokens + TOKENS - 1) / TOKENS;
    return (tokens + parts - 1) / parts;
}

template <int R, int T, class W, class X>
inline void products(const W* w, const X* x, [[maybe_unused]] const float* steps, int in, float* y, int out,
                     const float* scale, const float* bias) {
    if constexpr (std::is_same_v<X, float>) tile<R, T>(w, x, in, y, out, scale, bias);
#ifdef PAIRS
    else pair_tile<R, T>(w, x, steps, in, y, out, scale, bias);
#endif
}

template <int R, class W, class X>
void tiles(const W* w, const X* x, const float* steps, int tokens, int in, float* y, int out, const float* scale,
           const float* bias) {
    const int each = evenly(tokens);
    for (int t = 0; t < tokens; t += each)
        unrolled(std::min(each, tokens - t), [&](auto count) {
            products<R, count>(w, x + size_t(t) * in, steps ? steps + t : nullptr, in, y + size_t(t) * out, out, scale, bias);
        });
}

#ifdef PAIRS
// For 4 to 12 tokens whose activations do not fit into the L1 cache beside the weights, GROUP tiles of outputs take turns
// over chunks of the inputs. The sums of each tile wait in memory, so that the order of additions is that of pair_tile.
constexpr int GROUP = 4, CHUNK = 128, FEW = 4, PARTS = 3;  // at most FEW tokens in each of at most PARTS parts

inline bool in_chunks(int tokens, int in) {
    return tokens >= 4 && tokens <= FEW * PARTS && size_t(tokens) * in * sizeof(bf16) > 16384;
}

// Computes GROUP * ROWS outputs of all tokens.
void linear_chunks(const bf16* w, const bf16* x, int tokens, int in, float* y, int out, const float* bias) {
    constexpr int lead = 4 * CHUNK;  // inputs from a load to the weights that it prefetches
    floats kept[GROUP][PARTS][ROWS][TOKENS] = {};
    const int parts = std::max(2, (tokens + FEW - 1) / FEW), each = (tokens + parts - 1) / parts;
    for (int from = 0; from < in; from += CHUNK) {
        const int to = std::min(from + CHUNK, in);
        const size_t next = from + lead < in ? lead : size_t(GROUP) * ROWS * in - in + lead;
        for (int g = 0; g < GROUP * parts; g++) {
            const int o = g / parts * ROWS, first = g % parts * each;
            const bf16* rows = w + size_t(o) * in;
            auto& sums = kept[g / parts][g % parts];
            unrolled(std::min(each, tokens - first), [&](auto count) {
                constexpr int T = count;
                floats acc[ROWS][T];
                UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int t = 0; t < T; t++) acc[r][t] = sums[r][t];
                add_pairs<ROWS, T>(rows, x + size_t(first) * in, in, from, to, acc, [&](int i, int r) {
                    __builtin_prefetch(rows + size_t(r) * in + i + next);
                });
                UNROLL for (int r = 0; r < ROWS; r++) UNROLL for (int t = 0; t < T; t++) sums[r][t] = acc[r][t];
                float* outputs = y + size_t(first) * out + o;
                if (to == in) write_outputs<ROWS, T>(acc, nullptr, outputs, out, nullptr, bias ? bias + o : nullptr);
            });
        }
    }
}
#endif

// scale, bias: One value per output, or null.
struct Matrix { const void* weights; const float* scale; const float* bias; };

#ifdef MATRIX_TILES
// Matrix tiles compute 16 outputs of up to 16 tokens in the time of one token, from activations rounded to bfloat16.
constexpr int TALL = 16, DEEP = 32, PAIR = 2;  // outputs and inputs of a tile; tiles side by side
// Linux lets a process use matrix tiles only after this request.
const bool TILES = syscall(SYS_arch_prctl, 0x1023, 18) == 0;

inline int columns(int tokens) { return std::min(tokens, 16); }

// Tiles 0 and 1 are sums, 2 and 3 weights, 4 activations. Tiles 5 to 7 are weights and activations of the last inputs,
// which do not fill a whole tile.
inline void configure(int columns, int rest) {
    struct { uint8_t palette = 1, start = 0, none[14] = {}; uint16_t width[16] = {}; uint8_t rows[16] = {}; } now;
    for (int i = 0; i < 8; i++) now.rows[i] = TALL;
    for (int i : {0, 1, 4, 7}) now.width[i] = 4 * columns;
    for (int i : {2, 3}) now.width[i] = 2 * DEEP;
    for (int i : {5, 6}) now.width[i] = 2 * rest;
    now.rows[7] = rest / 2;
    if (!rest) now.rows[5] = now.rows[6] = now.width[7] = 0;
    __asm__ volatile("" ::: "memory");  // otherwise GCC assumes that only the first bytes of `now` are read
    _tile_loadconfig(&now);
}

// Rounds x [tokens, in], and copies it to blocks of columns, each [in / 2, columns, 2]. The last block is padded with
// zeros.
inline void interleave(const float* x, int tokens, int in, bf16* to) {
    const int n = columns(tokens), blocks = (tokens + n - 1) / n;
#pragma omp for schedule(static)
    for (int t = 0; t < blocks * n; t++) {
        bf16* at = to + size_t(t / n) * in * n + t % n * 2;
        for (int i = 0; i < in; i++) put(at[size_t(i / 2) * n * 2 + i % 2], t < tokens ? x[size_t(t) * in + i] : 0.f);
    }
}

// Computes PAIR * TALL outputs from w [32, in], and from x in the layout of interleave.
inline void matrix_tiles(const bf16* w, const bf16* x, int tokens, int in, float* y, int out, const float* bias) {
    const int n = columns(tokens), whole = in / DEEP * DEEP;
    float sums[PAIR * TALL * 16];
    for (int t = 0; t < tokens; t += n, x += size_t(in) * n) {
        _tile_zero(0);
        _tile_zero(1);
        for (int i = 0; i < whole; i += DEEP) {
            _tile_loadd(4, x + size_t(i) * n, 4 * n);
            _tile_loadd(2, w + i, 2 * in);
            _tile_dpbf16ps(0, 2, 4);
            _tile_loadd(3, w + size_t(TALL) * in + i, 2 * in);
            _tile_dpbf16ps(1, 3, 4);
        }
        if (whole < in) {
            _tile_loadd(7, x + size_t(whole) * n, 4 * n);
            _tile_loadd(5, w + whole, 2 * in);
            _tile_dpbf16ps(0, 5, 7);
            _tile_loadd(6, w + size_t(TALL) * in + whole, 2 * in);
            _tile_dpbf16ps(1, 6, 7);
        }
        _tile_stored(0, sums, 4 * n);
        _tile_stored(1, sums + TALL * n, 4 * n);
        for (int c = 0; c < std::min(n, tokens - t); c++)
            for (int r = 0; r < PAIR * TALL; r++) y[size_t(t + c) * out + r] = sums[r * n + c] + (bias ? bias[r] : 0.f);
    }
}

// Computes as many outputs as fill whole tiles, and returns their number.
int linear_tiles(const Matrix& m, const float* x, int tokens, int in, float* y, int out, bf16* rounded) {
    if (!TILES || in % 2) return 0;
    const int step = PAIR * TALL;
    interleave(x, tokens, in, rounded);
    configure(columns(tokens), in % DEEP);
#pragma omp for schedule(static)
    for (int o = 0; o < out / step; o++)
        matrix_tiles(static_cast<const bf16*>(m.weights) + size_t(o) * step * in, rounded, tokens, in, y + o * step, out,
                     m.bias ? m.bias + o * step : nullptr);
    _tile_release();
    return out / step * step;
}
#endif

// Memory for the rounded activations of a pass, padded to whole matrix tiles, and for the step of each token's int16
// values.
template <class X>
struct Rounded {
    Buffer<X> values;
    Buffer<float> steps;
    Rounded(size_t tokens, size_t most) {
        if constexpr (!std::is_same_v<X, float>) values.resize((tokens + 15) * most);
        if constexpr (std::is_same_v<X, int16_t>) steps.resize(tokens);
    }
};

inline void round_to(const float* x, int n, float* to, float*) { std::copy(x, x + n, to); }
#ifdef PAIRS
inline void round_to(const float* x, int n, bf16* to, float*) {
    for (int i = 0; i < n; i++) put(to[i], x[i]);
}

// The steps are large enough that no sum of products with int8 overflows.
inline void round_to(const float* x, int n, int16_t* to, float* step) {
    const int limit = std::min(32767, INT32_MAX / (2 * 127 * ((n + PAIRED - 1) / PAIRED)));
    floats tops = {};
    for (int i = 0; i < n; i += LANES) {
        const floats v = i + LANES <= n ? load(x + i) : load(x + i, n - i), size = v < 0 ? -v : v;
        tops = size <= tops ? tops : size;
    }
    float most = 0;
    for (int i = 0; i < LANES; i++) most = tops[i] <= most ? most : tops[i];
    const float per = most > 0 ? limit / most : 0;
    for (int i = 0; i < n; i++) to[i] = int16_t(std::nearbyint(x[i] * per));
    *step = most / limit;
}
#endif

// Computes y [tokens, out] = x [tokens, in] W^T with the scale and bias of W.
template <class W, class X>
void linear(const Matrix& m, const float* x, int tokens, int in, float* y, int out, Rounded<X>& rounded) {
    const W* w = static_cast<const W*>(m.weights);
    const X* a;
    int done = 0;
#ifdef MATRIX_TILES
    if constexpr (std::is_same_v<W, bf16>) done = linear_tiles(m, x, tokens, in, y, out, rounded.values.data());
    if (done == out) return;
#endif
    if constexpr (std::is_same_v<X, float>) {
        a = x;
    } else {
        a = rounded.values.data();
#pragma omp for schedule(static)
        for (int t = 0; t < tokens; t++)
            round_to(x + size_t(t) * in, in, &rounded.values[size_t(t) * in], rounded.steps.data() + t);
    }
    const float* steps = rounded.steps.empty() ? nullptr : rounded.steps.data();
    for (int t = 0; t < tokens; t += BLOCK) {
        const int count = std::min(BLOCK, tokens - t);
        const X* block = a + size_t(t) * in;
        const float* block_steps = steps ? steps + t : nullptr;
        float* to = y + size_t(t) * out;
#ifdef PAIRS
        if constexpr (std::is_same_v<W, bf16> && std::is_same_v<X, bf16>)
            if (!done && in_chunks(count, in)) {
                constexpr int step = GROUP * ROWS;
#pragma omp for schedule(static) nowait
                for (int o = 0; o < out / step * step; o += step)
                    linear_chunks(w + size_t(o) * in, block, count, in, to + o, out, m.bias ? m.bias + o : nullptr);
                done = out / step * step;
            }
#endif
#pragma omp for schedule(static) nowait
        for (int o = done / ROWS; o < out / ROWS; o++) {
            const int at = o * ROWS;
            tiles<ROWS>(w + size_t(at) * in, block, block_steps, count, in, to + at, out,
                        m.scale ? m.scale + at : nullptr, m.bias ? m.bias + at : nullptr);
        }
#pragma omp for schedule(static) nowait
        for (int o = out / ROWS * ROWS; o < out; o++)
            tiles<1>(w + size_t(o) * in, block, block_steps, count, in, to + o, out, m.scale ? m.scale + o : nullptr,
                     m.bias ? m.bias + o : nullptr);
    }
#pragma omp barrier
}

// Computes y = RMSNorm(x). If w is null, the model has no such norm, and y = x.
void norm(const float* x, const float* w, int n, float eps, float* y) {
    if (!w) {
        if (x != y) std::copy(x, x + n, y);
        return;
    }
    const float scale = 1.f / std::sqrt(dot(x, x, n) / n + eps);
    for (int i = 0; i < n; i++) y[i] = x[i] * scale * w[i];
}

}  // namespace

extern "C" {

struct Layer {
    Matrix qkv, o, gate_up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm, *attention_norm, *mlp_norm;  // each may be null
};

struct Model {
    int layers, hidden, heads, kv_heads, head_dim, ffn, vocab, threads;
    int embedded;  // number of ids that have a row in `embed`
    float eps;
    const void* embed;
    const float *norm, *cos, *sin;  // cos, sin: tables [context, C]; the sign in sin is that of llama.py
    Matrix head;
    const Layer* layer;
    const float* hidden_norm;  // norm of an EAGLE-3 head's states; q, k and v of its first layer read [2 D]. Else null
    int norm_before_residual;
    int window;  // sliding window of attention in tokens, or 0 for no window
    int whole_qk_norm;  // whether q_norm and k_norm are over all heads at once
    int head_size;      // number of outputs of the LM head: E, or V
    const int64_t* head_ids;  // ids of a trimmed LM head [E], or null. All other ids get the logit -inf.
};

// One pass over a cache. keys, values: [layers, rows, K, capacity, C].
struct Pass {
    int rows, width, last, capacity;
    const int64_t *ids, *used, *depth;  // [rows, T]; [rows]; of a token tree [rows, T], else null
    const uint8_t* sees;                // mask of a token tree [rows, T, T], else null
    void *keys, *values;
    float* logits;                      // [rows, last, V]
    float* states;                      // [N, D], states that an EAGLE-3 head reads; overwritten by its new states
    void* layer_states;                 // [rows, capacity, A D], states of A layers that a drafter reads; or null
    const int* layer_at;                // [layers + 1], index among the A layers after each number of layers, or -1
    int layers_kept;                    // A
};

}  // extern "C"

namespace {

// Computes sums [Q, count] of values [end, C], weighted by the weights [Q, room] of Q queries. count: Number of
// channels, at most R vectors of them.
template <int Q, int R, class KV>
inline void mix(const KV* values, int C, int count, const float* weights, int room, int end, float* out) {
    floats acc[Q][R] = {};
    for (int s = 0; s < end; s++)
        UNROLL for (int r = 0; r < R; r++) {
            const KV* at = values + size_t(s) * C + r * LANES;
            const floats v = count < LANES ? load(at, count) : load(at);
            UNROLL for (int q = 0; q < Q; q++) acc[q][r] = fused(floats{} + weights[q * room + s], v, acc[q][r]);
        }
    UNROLL for (int q = 0; q < Q; q++) {
        float all[R * LANES];
        UNROLL for (int r = 0; r < R; r++) store(all + r * LANES, acc[q][r]);
        std::copy(all, all + count, out + size_t(q) * C);
    }
}

#ifdef PAIRS
// Does the same in bfloat16, by products of pairs of tokens. R: Number of vectors of PAIRED channels.
template <int Q, int R>
inline void mix(const bf16* values, int C, int count, const bf16* weights, int room, int end, float* out) {
    floats acc[Q][R][2] = {};
    for (int s = 0; s < end; s += 2)
        UNROLL for (int r = 0; r < R; r++) {
            const __mmask32 mask = count < PAIRED ? (1u << count) - 1 : ~0u;
            const bf16* at = values + size_t(s) * C + r * PAIRED;
            const __m512i a = pairs(at, mask), b = pairs(at + C, s + 1 < end ? mask : 0);
            const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
            UNROLL for (int q = 0; q < Q; q++) {
                int both;
                std::memcpy(&both, weights + q * room + s, sizeof both);
                add(acc[q][r][0], low, _mm512_set1_epi32(both));
                add(acc[q][r][1], high, _mm512_set1_epi32(both));
            }
        }
    UNROLL for (int q = 0; q < Q; q++) {
        float all[R * PAIRED];
        UNROLL for (int i = 0; i < R * PAIRED; i++) all[i] = acc[q][i / PAIRED][i / 4 % 2][i % PAIRED / 8 * 4 + i % 4];
        std::memcpy(out + size_t(q) * C, all, 4 * count);
    }
}

inline void store(bf16* to, floats v) {
    const auto rounded = _mm512_cvtneps_pbh((__m512)v);
    std::memcpy(to, &rounded, sizeof rounded);
}
#endif

// Memory of one thread for the attention of TOKENS queries over `tokens` positions.
template <class X>
struct Attention {
    const int room;
    Buffer<X> queries, weights;
    Buffer<float> scores, out;
    Attention(int tokens, int C)
        : room((tokens + LANES) / LANES * LANES), queries(TOKENS * C), weights(TOKENS * room), scores(TOKENS * room),
          out(TOKENS * C) {}
};

// Converts the scores of one query to weights that are not normalised, and returns their sum. The query reads the
// positions from `first` up to and including `last`.
template <class X>
float softmax(float* scores, X* weights, int C, int first, int last, int end) {
    const float scale = 1.f / std::sqrt(float(C));
    const int whole = (end + LANES - 1) / LANES * LANES;
    std::fill(scores, scores + first, -INFINITY);
    std::fill(scores + last + 1, scores + whole, -INFINITY);
    floats most = load(scores) * scale, total = {};
    for (int s = LANES; s < whole; s += LANES) {
        const floats v = load(scores + s) * scale;
        most = v > most ? v : most;
    }
    float top = most[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, most[i]);
    for (int s = 0; s < whole; s += LANES) {
        const floats v = exp(load(scores + s) * scale - top);
        store(weights + s, v);
        total += v;
    }
    return sum(total);
}

// Computes attention for the queries first to first + Q - 1 of one row and KV head, whose tokens are a chain. Query j is
// head j % G of token j / G. q, out: Queries and output of the chain's first token.
template <int Q, class X, class KV>
void attend(const Pass& p, int window, int row, int first, int G, int C, const float* q, int next, const KV* keys, const KV* values,
            Attention<X>& memory, float* out, int next_out) {
    const int used = int(p.used[row]), end = used + (first + Q - 1) / G + 1, room = memory.room;
    float* scores = memory.scores.data();
    for (int j = 0; j < Q; j++)
        round_to(q + size_t((first + j) / G) * next + (first + j) % G * C, C, &memory.queries[j * C], nullptr);
    const X* a = memory.queries.data();
    int s = 0;
    for (; s + ROWS <= end; s += ROWS) {
        for (int i = 0; i < ROWS * C; i += int(64 / sizeof(KV))) __builtin_prefetch(values + size_t(s) * C + i);
        products<ROWS, Q>(keys + size_t(s) * C, a, nullptr, C, scores + s, room, nullptr, nullptr);
    }
    for (; s < end; s++) products<1, Q>(keys + size_t(s) * C, a, nullptr, C, scores + s, room, nullptr, nullptr);
    float totals[Q];
    for (int j = 0; j < Q; j++) {
        const int at = used + (first + j) / G, oldest = window ? std::max(at - window + 1, 0) : 0;
        totals[j] = softmax(scores + j * room, &memory.weights[j * room], C, oldest, at, end);
    }
    constexpr int wide = std::is_same_v<X, float> ? LANES : 2 * LANES, most = std::is_same_v<X, float> ? ROWS : 2;
    int i = 0;
    for (; i + most * wide <= C; i += most * wide)
        mix<Q, most>(values + i, C, most * wide, memory.weights.data(), room, end, memory.out.data() + i);
    for (; i < C; i += wide)
        mix<Q, 1>(values + i, C, std::min(wide, C - i), memory.weights.data(), room, end, memory.out.data() + i);
    for (int j = 0; j < Q; j++) {
        float* to = out + size_t((first + j) / G) * next_out + (first + j) % G * C;
        for (int i = 0; i < C; i++) to[i] = memory.out[j * C + i] / totals[j];
    }
}

// The number of a row's new tokens that are a chain from the first on. In a token tree, the others are not.
int chain_length(const Pass& p, int row) {
    int t = 1;
    for (; t < p.width; t++) {
        const uint8_t* sees = p.sees + (size_t(row) * p.width + t) * p.width;
        if (std::count(sees, sees + t + 1, 1) != t + 1 || std::count(sees + t + 1, sees + p.width, 1)) break;
    }
    return t;
}

// What is wrong with a pass. native_cpu.py has the messages in the same order.
enum Fault { NONE, ID, TREE };

// Checks the values that index memory: ids, and the tokens that each token of a tree sees. native_cpu.py checks sizes
// and lengths. wrong: Receives the id, or the index of the tree's token.
Fault check(const Model& m, const Pass& p, int64_t& wrong) {
    const int T = p.width;
    for (int n = 0; n < p.rows * T; n++)
        if (p.ids[n] < 0 || p.ids[n] >= m.embedded) return wrong = p.ids[n], ID;
    for (int n = 0; p.sees && n < p.rows * T; n++) {
        const uint8_t *sees = p.sees + size_t(n) * T, *own = sees + n % T, *end = sees + T;
        // a token sees its ancestors, which come before it, and itself
        if (*own != 1 || p.depth[n] != std::count(sees, own, 1) || std::count(own + 1, end, 0) != end - own - 1)
            return wrong = n % T, TREE;
    }
    return NONE;
}

template <class W, class KV>
int run(const Model& m, const Pass& p, int64_t* wrong) {
    if (const Fault fault = check(m, p, *wrong)) return fault;
    const int D = m.hidden, H = m.heads, K = m.kv_heads, C = m.head_dim, F = m.ffn, T = p.width, N = p.rows * T;
    const int QKV = (H + 2 * K) * C, G = H / K, each = evenly(T * G), blocks = (T * G + each - 1) / each;
    const int read = m.hidden_norm ? 2 * D : D;  // inputs of q, k and v in the first layer
    Buffer<float> stream(m.hidden_norm ? 0 : size_t(N) * D), h(size_t(N) * read);
    Buffer<float> qkv(size_t(N) * QKV), mixed(size_t(N) * H * C);
    float* const x = m.hidden_norm ? p.states : stream.data();
    Buffer<float> both(size_t(N) * 2 * F), inner(size_t(N) * F);
    Buffer<float> trimmed(m.head_ids ? size_t(p.rows) * p.last * m.head_size : 0);
    Rounded<typename Meeting<W, KV>::type> rounded(N, std::max({read, F, H * C}));
    const int64_t furthest = *std::max_element(p.used, p.used + p.rows) + T;
    const size_t slab = size_t(K) * p.capacity * C;  // size of the keys of one row and layer
    std::vector<int> chains;  // chain_length() of each row of a token tree
    if (p.sees)
        for (int row = 0; row < p.rows; row++) chains.push_back(chain_length(p, row));
    for (int n = 0; n < N; n++) {  // copy the embedding to where the first layer reads it
        float* to = m.hidden_norm ? &h[size_t(n) * read] : &x[size_t(n) * D];
        for (int i = 0; i < D; i++) to[i] = one(static_cast<const KV*>(m.embed)[p.ids[n] * D + i]);
    }
    const auto keep = [&](int layers) {
        const int at = p.layer_states ? p.layer_at[layers] : -1;
        if (at < 0) return;
#pragma omp for schedule(static)
        for (int n = 0; n < N; n++) {
            const size_t slot = (size_t(n / T) * p.capacity + p.used[n / T] + n % T) * p.layers_kept + at;
            for (int i = 0; i < D; i++) put(static_cast<KV*>(p.layer_states)[slot * D + i], x[size_t(n) * D + i]);
        }
    };
#pragma omp parallel num_threads(m.threads) if (m.threads > 1)
    {
        Attention<typename Meeting<KV, KV>::type> memory(furthest, C);
        for (int l = 0; l < m.layers; l++) {
            const Layer& layer = m.layer[l];
            const bool joined = m.hidden_norm && l == 0;  // the layer reads embeddings and states
            const int read = joined ? 2 * D : D;
            keep(l);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                float *a = &x[size_t(n) * D], *b = &h[size_t(n) * read];
                norm(joined ? b : a, layer.input_norm, D, m.eps, b);
                if (joined) norm(a, m.hidden_norm, D, m.eps, b + D);
                if (joined && m.norm_before_residual) std::copy(b + D, b + 2 * D, a);
            }
            linear<W>(layer.qkv, h.data(), N, read, qkv.data(), QKV, rounded);
            if (m.whole_qk_norm) {
#pragma omp for schedule(static)
                for (int n = 0; n < N; n++) {
                    float *q = &qkv[size_t(n) * QKV], *k = q + H * C;
                    norm(q, layer.q_norm, H * C, m.eps, q);
                    norm(k, layer.k_norm, K * C, m.eps, k);
                }
            }
#pragma omp for schedule(static)
            for (int g = 0; g < N * (H + K); g++) {  // rotate queries and keys; keys and values go to the cache
                const int n = g / (H + K), head = g % (H + K), row = n / T, t = n % T;
                float* v = &qkv[size_t(n) * QKV + head * C];
                if (!m.whole_qk_norm) norm(v, head < H ? layer.q_norm : layer.k_norm, C, m.eps, v);
                const int64_t at = p.used[row] + (p.depth ? p.depth[n] : t);
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
            const auto first_slot = [&](int row, int kv) {
                return (size_t(l) * p.rows + row) * slab + size_t(kv) * p.capacity * C;
            };
            // Computes `queries` queries from `first` on of the chain whose first token is token `root` of the row.
            const auto attend_chain = [&](int row, int kv, int root, int first, int queries) {
                const size_t slot = first_slot(row, kv);
                unrolled(queries, [&](auto count) {
                    attend<count>(p, m.window, row, first, G, C, &qkv[size_t(row * T + root) * QKV + kv * G * C], QKV,
                                  static_cast<KV*>(p.keys) + slot, static_cast<KV*>(p.values) + slot, memory,
                                  &mixed[(size_t(row * T + root) * H + kv * G) * C], H * C);
                });
            };
            // Computes the queries of a tree's tokens from token `chain` on. The keys and values of a token's ancestors
            // move to where a chain has them, and in the end back. Then the token gets the bits that it has in a chain.
            const auto attend_branches = [&](int row, int kv, int chain) {
                const size_t slot = first_slot(row, kv) + p.used[row] * C, size = size_t(T) * C;
                KV *keys = static_cast<KV*>(p.keys) + slot, *values = static_cast<KV*>(p.values) + slot;
                const Buffer<KV> own_keys(keys, keys + size), own_values(values, values + size);
                const int few = evenly(G);
                for (int t = chain; t < T; t++) {
                    const uint8_t* sees = p.sees + (size_t(row) * T + t) * T;
                    int depth = -1;
                    for (int i = 0; i < T; i++) {
                        if (!sees[i]) continue;
                        depth++;
                        std::copy_n(&own_keys[size_t(i) * C], C, keys + size_t(depth) * C);
                        std::copy_n(&own_values[size_t(i) * C], C, values + size_t(depth) * C);
                    }
                    for (int head = 0; head < G; head += few)
                        attend_chain(row, kv, t - depth, depth * G + head, std::min(few, G - head));
                }
                std::copy(own_keys.begin(), own_keys.end(), keys);
                std::copy(own_values.begin(), own_values.end(), values);
            };
            if (!p.sees) {
#pragma omp for schedule(static)
                for (int g = 0; g < p.rows * K * blocks; g++) {
                    const int first = g % blocks * each;
                    attend_chain(g / (K * blocks), g / blocks % K, 0, first, std::min(each, T * G - first));
                }
            } else {
#pragma omp for schedule(static)
                for (int g = 0; g < p.rows * K; g++) {
                    const int row = g / K, kv = g % K, queries = chains[row] * G, few = evenly(queries);
                    for (int first = 0; first < queries; first += few)
                        attend_chain(row, kv, 0, first, std::min(few, queries - first));
                    if (chains[row] < T) attend_branches(row, kv, chains[row]);
                }
            }
            linear<W>(layer.o, mixed.data(), N, H * C, h.data(), D, rounded);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                float *a = &x[size_t(n) * D], *b = &h[size_t(n) * D];
                norm(b, layer.attention_norm, D, m.eps, b);
                for (int i = 0; i < D; i++) a[i] += b[i];
                norm(a, layer.post_norm, D, m.eps, b);
            }
            linear<W>(layer.gate_up, h.data(), N, D, both.data(), 2 * F, rounded);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                const float *gate = &both[size_t(n) * 2 * F], *up = gate + F;
                float* to = &inner[size_t(n) * F];
                for (int i = 0; i < F; i += LANES) {
                    // a copy of a count that the compiler knows is one instruction
                    const int count = std::min(LANES, F - i);
                    const floats a = count < LANES ? load(gate + i, count) : load(gate + i);
                    const floats b = count < LANES ? load(up + i, count) : load(up + i);
                    const floats product = a / (1.f + exp(-a)) * b;
                    if (count < LANES) std::memcpy(to + i, &product, 4 * count);
                    else store(to + i, product);
                }
            }
            linear<W>(layer.down, inner.data(), N, F, h.data(), D, rounded);
#pragma omp for schedule(static)
            for (int n = 0; n < N; n++) {
                float *a = &x[size_t(n) * D], *b = &h[size_t(n) * D];
                norm(b, layer.mlp_norm, D, m.eps, b);
                for (int i = 0; i < D; i++) a[i] += b[i];
            }
        }
        keep(m.layers);
#pragma omp for schedule(static)
        for (int n = 0; n < p.rows * p.last; n++) {
            const int token = n / p.last * T + T - p.last + n % p.last;
            norm(&x[size_t(token) * D], m.norm, D, m.eps, &h[size_t(n) * D]);
        }
        linear<W>(m.head, h.data(), p.rows * p.last, D, m.head_ids ? trimmed.data() : p.logits, m.head_size, rounded);
        if (m.head_ids) {
#pragma omp for schedule(static)
            for (int n = 0; n < p.rows * p.last; n++) {
                float* all = p.logits + size_t(n) * m.vocab;
                std::fill(all, all + m.vocab, -INFINITY);
                for (int i = 0; i < m.head_size; i++) all[m.head_ids[i]] = trimmed[size_t(n) * m.head_size + i];
            }
        }
    }
    return NONE;
}

}  // namespace

// Each runs a pass, and returns 0. Or it returns a Fault and the wrong value, and has written nothing else.
extern "C" {
int run_float32(const Model* m, const Pass* p, int64_t* wrong) { return run<float, float>(*m, *p, wrong); }
int run_bfloat16(const Model* m, const Pass* p, int64_t* wrong) { return run<bf16, bf16>(*m, *p, wrong); }
int run_int8_float32(const Model* m, const Pass* p, int64_t* wrong) { return run<int8_t, float>(*m, *p, wrong); }
int run_int8_bfloat16(const Model* m, const Pass* p, int64_t* wrong) { return run<int8_t, bf16>(*m, *p, wrong); }

// Returns whether passes run on as many threads as Model says. Otherwise they run on one.
int uses_openmp() {
#ifdef _OPENMP
    return 1;
#else
    return 0;
#endif
}
}
