// Attention of a few query rows over many keys, on the CPU: what the backend `flash_decode` runs. Each key and value is
// read once for all query heads of its group, where these attend the same keys. The keys are split among the threads,
// and the parts are merged through their maxima and sums: Flash-Decoding (Dao et al. 2023,
// https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Accumulation is fp32. A key that a row may not attend is
// not read for it, so nothing that stands there can leak.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

namespace flash_decode {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kTile = 64;               // keys that are scored before their values are added up
constexpr int64_t kLeastWork = 32 << 10;    // elements of keys and values that are worth waking a thread for
constexpr int64_t kFar = int64_t(1) << 60;  // no position is farther than this from key 0
constexpr int64_t kNoLimit = 4 * kFar;      // of a window: beyond every position, and far from overflow when added
constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
static_assert(kTile % kLanes == 0);

// --- what a call asks for -------------------------------------------------------------------------------------------

using Strides = std::array<int64_t, 4>;

// A tensor that broadcasts to [B, Hq, Sq, Skv]; without data where the call has none.
template <typename T>
struct Pairs {
  const T* data = nullptr;
  Strides strides{};

  explicit operator bool() const {
    return data != nullptr;
  }
  const T* row(int64_t b, int64_t h, int64_t i) const {
    return data + b * strides[0] + h * strides[1] + i * strides[2];
  }
  bool differs_by_row() const {
    return data != nullptr && (strides[1] != 0 || strides[2] != 0);
  }
};

template <typename T>
struct Call {
  int64_t B, Hq, Hkv, Sq, Skv, D, Dv;
  Pairs<T> q, k, v;
  float scale, cap;         // cap 0: none
  int64_t left, right;      // how far before and after its own position a row attends; at most kNoLimit
  int64_t offset;           // key position of query row 0
  const int64_t* offsets;   // the same for each sequence, [B], or null
  const int64_t* lengths;   // keys of each sequence, [B], or null
  Pairs<uint8_t> keep;      // of a bool tensor, whose bytes torch does not promise to be 0 or 1
  Pairs<float> bias;
  const float* slopes;      // [Hq] or null
  const float* sinks;       // [Hq] or null
  T* out;                   // [B, Hq, Sq, Dv]
  float* lse;               // [B, Hq, Sq] or null

  int64_t groups() const {
    return Hq / Hkv;
  }
  int64_t rows() const {  // of one kv head
    return groups() * Sq;
  }
  int64_t position(int64_t b, int64_t i) const {
    return i + std::clamp(offsets != nullptr ? offsets[b] : offset, -kFar, kFar);
  }
  // The keys that window and lengths leave to the query rows first to last of a sequence.
  std::pair<int64_t, int64_t> keys_of(int64_t b, int64_t first, int64_t last) const {
    const int64_t end = lengths != nullptr ? std::clamp<int64_t>(lengths[b], 0, Skv) : Skv;
    const int64_t from = std::clamp<int64_t>(position(b, first) - left, 0, end);
    return {from, std::clamp<int64_t>(position(b, last) + right + 1, from, end)};
  }
};

// --- vectors --------------------------------------------------------------------------------------------------------

inline Vec load(const float* p) {
  return Vec::loadu(p);
}

inline Vec load(const at::BFloat16* p) {
  Vec out;
  at::vec::load_fp32_from_bf16(p, out);
  return out;
}

inline Vec load(const at::Half* p) {
  Vec out;
  at::vec::load_fp32_from_fp16(p, out);
  return out;
}

// The size of a row where vectors may run over its end.
inline int64_t whole_vectors(int64_t n) {
  return (n + kLanes - 1) / kLanes * kLanes;
}

inline float sum_of(Vec x) {
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return a + b; }, x);
}

inline float maximum_of(Vec x) {  // NaN if there is any
  return at::vec::vec_reduce_all<float>([](Vec& a, Vec& b) { return at::vec::maximum(a, b); }, x);
}

// Ask for what is needed some keys later. Rows of fewer elements are read ahead well enough without being told.
constexpr int64_t kAhead = 8, kLeastAhead = 128;
constexpr int64_t kCacheLine = 64;  // bytes

template <typename T>
inline void ask_for(const T* row, int64_t n) {
  for (int64_t c = 0; c < n; c += kCacheLine / sizeof(T)) {
#ifdef __GNUC__
    __builtin_prefetch(row + c);
#endif
  }
}

template <int N>
using Count = std::integral_constant<int, N>;

// How many vectors beside those of R rows keep the sums of all in registers.
constexpr int vectors_beside(int R) {
  return R == 1 ? 8 : R == 2 ? 4 : R == 3 ? 3 : 2;
}

// f(Count<R>, first row) for blocks of at most four rows.
template <typename F>
void in_blocks(int64_t rows, const F& f) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    f(Count<4>{}, r);
  }
  switch (rows - r) {
    case 3:
      return f(Count<3>{}, r);
    case 2:
      return f(Count<2>{}, r);
    case 1:
      return f(Count<1>{}, r);
  }
}

// scores[r][j] = q[r] . k[keys[j]]
template <int R, typename T>
void score(const float* q, int64_t d, const T* k, int64_t stride, const int32_t* keys, int64_t n, float* scores) {
  int64_t j = 0;
  const auto block = [&](auto count) {
    constexpr int N = decltype(count)::value;
    Vec sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        sums[r][i] = Vec(0.f);
      }
    }
    for (int i = 0; i < N && d >= kLeastAhead; ++i) {
      ask_for(k + (keys[j + i] + kAhead) * stride, d);
    }
    for (int64_t c = 0; c + kLanes <= d; c += kLanes) {
      Vec rows[R];
      for (int r = 0; r < R; ++r) {
        rows[r] = Vec::loadu(q + r * d + c);
      }
      for (int i = 0; i < N; ++i) {
        const Vec key = load(k + keys[j + i] * stride + c);
        for (int r = 0; r < R; ++r) {
          sums[r][i] = at::vec::fmadd(rows[r], key, sums[r][i]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        scores[r * kTile + j + i] = sum_of(sums[r][i]);
      }
    }
    j += N;
  };
  while (j + vectors_beside(R) <= n) {
    block(Count<vectors_beside(R)>{});
  }
  while (j < n) {
    block(Count<1>{});
  }
  for (int64_t c = d / kLanes * kLanes; c < d; ++c) {  // apart, so that the compiler keeps the sums above in registers
    for (int r = 0; r < R; ++r) {
      for (j = 0; j < n; ++j) {
        scores[r * kTile + j] += q[r * d + c] * static_cast<float>(k[keys[j] * stride + c]);
      }
    }
  }
}

// out[r] += weights[r] @ v[keys]; rows of out are whole vectors
template <int R, typename T>
void add_values(
    const float* weights, const T* v, int64_t stride, const int32_t* keys, int64_t n, int64_t dv, float* out) {
  const int64_t width = whole_vectors(dv);
  int64_t c = 0;
  const auto strip = [&](auto count) {
    constexpr int N = decltype(count)::value;
    Vec sums[R][N];
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        sums[r][i] = Vec::loadu(out + r * width + c + i * kLanes);
      }
    }
    for (int64_t j = 0; j < n; ++j) {
      const T* value = v + keys[j] * stride + c;
      if (dv >= kLeastAhead) {
        ask_for(value + kAhead * stride, N * kLanes);
      }
      for (int i = 0; i < N; ++i) {
        const Vec x = load(value + i * kLanes);
        for (int r = 0; r < R; ++r) {
          sums[r][i] = at::vec::fmadd(Vec(weights[r * kTile + j]), x, sums[r][i]);
        }
      }
    }
    for (int r = 0; r < R; ++r) {
      for (int i = 0; i < N; ++i) {
        sums[r][i].store(out + r * width + c + i * kLanes);
      }
    }
    c += N * kLanes;
  };
  while (c + vectors_beside(R) * kLanes <= dv) {
    strip(Count<vectors_beside(R)>{});
  }
  while (c + kLanes <= dv) {
    strip(Count<1>{});
  }
  for (int r = 0; r < R && c < dv; ++r) {
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t rest = c; rest < dv; ++rest) {
        out[r * width + rest] += weights[r * kTile + j] * static_cast<float>(v[keys[j] * stride + rest]);
      }
    }
  }
}

// --- one kv head ----------------------------------------------------------------------------------------------------

// The running softmax of some rows: the largest score so far, and sums of exp(score - largest), alone and with values.
struct Softmax {
  int64_t width = 0;  // of a row of out
  std::vector<float> largest, sum, out;

  void start(int64_t rows, int64_t dv) {
    width = whole_vectors(dv);
    largest.assign(rows, kMinusInf);
    sum.assign(rows, 0.f);
    out.assign(rows * width, 0.f);
  }

  // What is subtracted before the exponential: -inf less -inf would be NaN where exp(-inf) = 0 is meant.
  static float shift(float largest) {
    return largest == kMinusInf ? 0.f : largest;
  }

  // Let the row's largest score be at least this one, or NaN.
  void raise(int64_t r, float score) {
    const float before = largest[r];
    if (std::isnan(before) || score <= before) {
      return;
    }
    largest[r] = score;
    if (before == kMinusInf) {
      return;  // nothing was added yet
    }
    const float fade = std::exp(before - score);
    sum[r] *= fade;
    for (int64_t c = r * width; c < (r + 1) * width; c += kLanes) {
      (Vec::loadu(&out[c]) * Vec(fade)).store(&out[c]);
    }
  }

  void merge(const Softmax& other) {
    for (int64_t r = 0; r < static_cast<int64_t>(sum.size()); ++r) {
      raise(r, other.largest[r]);
      const float fade = std::exp(other.largest[r] - shift(largest[r]));
      sum[r] += other.sum[r] * fade;
      for (int64_t c = r * width; c < (r + 1) * width; c += kLanes) {
        at::vec::fmadd(Vec::loadu(&other.out[c]), Vec(fade), Vec::loadu(&out[c])).store(&out[c]);
      }
    }
  }
};

// Computes kv heads one after the other, tile by tile.
template <typename T>
class Worker {
 public:
  Softmax softmax;

  explicit Worker(const Call<T>& call) : call_(call), q_(call.rows() * call.D), scores_(call.rows() * kTile) {}

  void start(int64_t b, int64_t head) {
    b_ = b;
    head_ = head;
    softmax.start(call_.rows(), call_.Dv);
    for (int64_t r = 0; r < call_.rows(); ++r) {
      const T* row = call_.q.row(b_, head_of(r), query_of(r));
      std::transform(row, row + call_.D, &q_[r * call_.D], [&](T x) { return static_cast<float>(x) * call_.scale; });
    }
  }

  // The keys first to last, no more than a tile, for each row those that it attends.
  void add_tile(int64_t first, int64_t last) {
    std::array<int32_t, kTile> keys;
    const int64_t n = list_keys(0, first, last, keys.data());
    if (all_attend(keys.data(), n, first, last)) {
      return add(0, call_.rows(), keys.data(), n);
    }
    for (int64_t r = 0; r < call_.rows(); ++r) {
      add(r, 1, keys.data(), list_keys(r, first, last, keys.data()));
    }
  }

 private:
  const Call<T>& call_;
  std::vector<float> q_, scores_;  // the rows times the scale, and their scores of one tile
  int64_t b_ = 0, head_ = 0;

  int64_t head_of(int64_t r) const {
    return head_ * call_.groups() + r / call_.Sq;
  }
  int64_t query_of(int64_t r) const {
    return r % call_.Sq;
  }

  // Whether every row attends the n keys that row 0 does.
  bool all_attend(const int32_t* keys, int64_t n, int64_t first, int64_t last) const {
    const bool per_head = call_.bias.differs_by_row() || call_.keep.differs_by_row();
    if (!per_head && call_.Sq == 1) {
      return true;
    }
    std::array<int32_t, kTile> others;
    const int64_t step = per_head ? 1 : call_.Sq - 1;  // windows move one way: the last row stands for those between
    for (int64_t r = step; r < (per_head ? call_.rows() : call_.Sq); r += step) {
      if (list_keys(r, first, last, others.data()) != n || !std::equal(keys, keys + n, others.data())) {
        return false;
      }
    }
    return true;
  }

  // Those of the keys first to last that row r attends; -inf in a bias masks, too.
  int64_t list_keys(int64_t r, int64_t first, int64_t last, int32_t* keys) const {
    const auto [from, to] = call_.keys_of(b_, query_of(r), query_of(r));
    const uint8_t* keep = call_.keep ? call_.keep.row(b_, head_of(r), query_of(r)) : nullptr;
    const float* bias = call_.bias ? call_.bias.row(b_, head_of(r), query_of(r)) : nullptr;
    int64_t n = 0;
    for (int64_t j = std::max(first, from); j < std::min(last, to); ++j) {
      keys[n] = static_cast<int32_t>(j);
      const bool is_kept = keep == nullptr || keep[j * call_.keep.strides[3]] != 0;
      n += is_kept && (bias == nullptr || bias[j * call_.bias.strides[3]] != kMinusInf) ? 1 : 0;
    }
    return n;
  }

  // Rows that attend the same n keys.
  void add(int64_t first, int64_t rows, const int32_t* keys, int64_t n) {
    if (n <= 0) {
      return;
    }
    in_blocks(rows, [&](auto count, int64_t r) {
      const float* q = &q_[(first + r) * call_.D];
      float* scores = &scores_[(first + r) * kTile];
      score<count>(q, call_.D, call_.k.row(b_, head_, 0), call_.k.strides[2], keys, n, scores);
    });
    for (int64_t r = first; r < first + rows; ++r) {
      weigh(r, keys, n);
    }
    in_blocks(rows, [&](auto count, int64_t r) {
      const float* weights = &scores_[(first + r) * kTile];
      float* out = &softmax.out[(first + r) * softmax.width];
      add_values<count>(weights, call_.v.row(b_, head_, 0), call_.v.strides[2], keys, n, call_.Dv, out);
    });
  }

  // Scores of a row to weights, in place.
  void weigh(int64_t r, const int32_t* keys, int64_t n) {
    float* scores = &scores_[r * kTile];
    const int64_t filled = (n + kLanes - 1) / kLanes * kLanes;
    std::fill(scores + n, scores + filled, 0.f);
    if (call_.cap != 0.f) {
      for (int64_t j = 0; j < filled; j += kLanes) {
        ((Vec::loadu(scores + j) / Vec(call_.cap)).tanh() * Vec(call_.cap)).store(scores + j);
      }
    }
    if (call_.bias) {
      const float* bias = call_.bias.row(b_, head_of(r), query_of(r));
      for (int64_t j = 0; j < n; ++j) {
        scores[j] += bias[keys[j] * call_.bias.strides[3]];
      }
    }
    if (call_.slopes != nullptr) {
      const int64_t position = call_.position(b_, query_of(r));
      for (int64_t j = 0; j < n; ++j) {
        scores[j] -= call_.slopes[head_of(r)] * static_cast<float>(std::abs(position - keys[j]));
      }
    }
    std::fill(scores + n, scores + filled, kMinusInf);
    Vec largest(kMinusInf);
    for (int64_t j = 0; j < filled; j += kLanes) {
      largest = at::vec::maximum(largest, Vec::loadu(scores + j));
    }
    softmax.raise(r, maximum_of(largest));
    const Vec shift(Softmax::shift(softmax.largest[r]));
    Vec total(0.f);
    for (int64_t j = 0; j < filled; j += kLanes) {
      const Vec weight = (Vec::loadu(scores + j) - shift).exp();
      weight.store(scores + j);
      total = total + weight;
    }
    softmax.sum[r] += sum_of(total);
  }
};

// --- all of them ----------------------------------------------------------------------------------------------------

// Write the rows of one kv head. A row that attends nothing is 0, and its lse -inf or its sink.
template <typename T>
void write(const Call<T>& call, Softmax& softmax, int64_t b, int64_t head) {
  for (int64_t r = 0; r < call.rows(); ++r) {
    const int64_t h = head * call.groups() + r / call.Sq, row = (b * call.Hq + h) * call.Sq + r % call.Sq;
    if (call.sinks != nullptr) {
      softmax.raise(r, call.sinks[h]);
      softmax.sum[r] += std::exp(call.sinks[h] - Softmax::shift(softmax.largest[r]));
    }
    const float sum = softmax.sum[r], factor = sum == 0.f ? 0.f : 1.f / sum;
    const float* from = &softmax.out[r * softmax.width];
    std::transform(from, from + call.Dv, call.out + row * call.Dv, [=](float x) { return static_cast<T>(x * factor); });
    if (call.lse != nullptr) {
      call.lse[row] = sum == 0.f ? kMinusInf : std::log(sum) + Softmax::shift(softmax.largest[r]);
    }
  }
}

// The tiles of all sequences and kv heads in a row, so that each thread takes an equal share of them.
template <typename T>
struct Tiles {
  std::vector<std::pair<int64_t, int64_t>> keys;  // of each sequence
  std::vector<int64_t> starts{0};                 // the number of the first tile of each kv head, and their count

  explicit Tiles(const Call<T>& call) {
    for (int64_t b = 0; b < call.B; ++b) {
      keys.push_back(call.keys_of(b, 0, call.Sq - 1));
      const auto [from, to] = keys.back();
      const int64_t tiles = std::max<int64_t>(1, (to - from + kTile - 1) / kTile);  // one that is empty writes the 0
      for (int64_t h = 0; h < call.Hkv; ++h) {
        starts.push_back(starts.back() + tiles);
      }
    }
  }
};

template <typename T>
void compute(const Call<T>& call) {
  const Tiles<T> tiles(call);
  const int64_t units = tiles.starts.back(), heads = call.B * call.Hkv;
  const int64_t worth = std::max<int64_t>(1, units * kTile * (call.D + call.Dv) / kLeastWork);
#ifdef INTRA_OP_PARALLEL
  const int64_t shares = std::min({static_cast<int64_t>(at::get_num_threads()), units, worth});
#else
  const int64_t shares = 1;  // at::parallel_for has one thread without OpenMP
#endif
  // heads that a border between two shares cuts: [share][0] one that began before it, [share][1] one that ends with it
  std::vector<std::array<Softmax, 2>> parts(shares);
  const auto border = [&](int64_t share) { return share * units / shares; };

  at::parallel_for(0, shares, 1, [&](int64_t first_share, int64_t last_share) {
    Worker<T> worker(call);
    for (int64_t share = first_share; share < last_share; ++share) {
      const int64_t begin = border(share), end = border(share + 1);
      int64_t head = std::upper_bound(tiles.starts.begin(), tiles.starts.end(), begin) - tiles.starts.begin() - 1;
      for (int64_t unit = begin; unit < end; ++head) {
        const int64_t first = tiles.starts[head], last = tiles.starts[head + 1], stop = std::min(last, end);
        const int64_t b = head / call.Hkv;
        const bool is_whole = unit == first && stop == last;
        worker.start(b, head % call.Hkv);
        for (; unit < stop; ++unit) {
          const int64_t from = tiles.keys[b].first + (unit - first) * kTile;
          worker.add_tile(from, std::min(from + kTile, tiles.keys[b].second));
        }
        if (is_whole) {
          write(call, worker.softmax, b, head % call.Hkv);
        } else {
          std::swap(parts[share][stop == end ? 1 : 0], worker.softmax);
        }
      }
    }
  });

  for (int64_t head = 0, share = 0; head < heads; ++head) {
    const int64_t first = tiles.starts[head], last = tiles.starts[head + 1];
    while (border(share + 1) <= first) {
      ++share;
    }
    if (border(share + 1) >= last && border(share) <= first) {
      continue;  // one share has all of it, and has written it
    }
    Softmax& all = parts[share][1];
    for (int64_t next = share + 1; next < shares && border(next) < last; ++next) {
      all.merge(parts[next][border(next + 1) <= last ? 1 : 0]);
    }
    write(call, all, head / call.Hkv, head % call.Hkv);
  }
}

}  // namespace flash_decode
