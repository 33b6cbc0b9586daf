#pragma once

#include "longspan/kernels/common/cpu/simd/functions.h"
#include "longspan/kernels/common/cpu/simd/vectors.h"
#include "longspan/kernels/token_loss/token_loss.h"

/// The losses of rows of logits, in vectors. Words are summed in blocks, and
/// blocks in double precision: a vocabulary is long.
namespace longspan {
namespace {

constexpr int64_t kWordsInBlock = 1024;

template <class T>
inline Vector<T> larger(Vector<T> a, Vector<T> b) {
  return a > b ? a : b;
}

template <class T>
inline T sum_of_lanes(Vector<T> x) {
  T sum = 0;
  for (int i = 0; i < kLanes<T>; ++i) sum += x[i];
  return sum;
}

/// Calls body(place, vector, lanes) for the words of a row; of the last vector
/// only some lanes may be there, and the rest of it is `filler`.
template <class T, class Body>
inline void each_vector(const T* row, int64_t begin, int64_t end, T filler,
                        const Body& body) {
  int64_t i = begin;
  for (; i + kLanes<T> <= end; i += kLanes<T>) body(i, load(row + i));
  if (i == end) return;
  T rest[kLanes<T>];
  for (int64_t j = 0; j < kLanes<T>; ++j) {
    rest[j] = i + j < end ? row[i + j] : filler;
  }
  body(i, load(rest));
}

template <class T>
class LossRow {
 public:
  LossRow(const TokenLossArgs<T>& args, int64_t token)
      : args_(args),
        token_(token),
        words_(args.words),
        row_(args.logits + token * args.words),
        label_(args.labels[token]),
        softcap_(static_cast<T>(args.options.softcap)),
        scale_(static_cast<T>(args.options.scale)) {}

  void run() {
    const TokenLossOptions& options = args_.options;
    if (label_ == options.ignored) return fill(0);
    if (label_ < 0 || label_ >= words_)
      return fill(static_cast<T>(__builtin_nan("")));
    prepare();
    const T wanted = row_[label_];
    const bool right = is_first_of_greatest(wanted);
    add_up();
    const T log_sum = static_cast<T>(__builtin_log(sum_));
    const T lse = most_ + log_sum;
    T loss = lse - wanted;
    if (options.smoothing != 0) {
      const T mean = static_cast<T>(total_ / static_cast<double>(words_));
      loss += static_cast<T>(options.smoothing) * (wanted - mean);
    }
    loss += static_cast<T>(options.z_loss) * lse * lse;
    args_.loss[token_] = loss;
    args_.lse[token_] = lse;
    args_.entropy[token_] = log_sum - static_cast<T>(weighted_ / sum_);
    args_.right[token_] = right;
    if (args_.with_gradient) differentiate(lse);
  }

 private:
  /// Results, and the gradient, of a row that says nothing.
  void fill(T value) {
    args_.loss[token_] = args_.lse[token_] = args_.entropy[token_] = value;
    args_.right[token_] = false;
    if (!args_.with_gradient) return;
    for (int64_t i = 0; i < words_; ++i) row_[i] = value;
  }

  void put(int64_t place, Vector<T> x) {
    if (place + kLanes<T> <= words_) return store(row_ + place, x);
    for (int64_t j = 0; place + j < words_; ++j) row_[place + j] = x[j];
  }

  /// Logits become x; the greatest and the sum of them.
  void prepare() {
    Vector<T> most = all_lanes(-kInfinity<T>);
    const T* const bias = args_.bias;
    for (int64_t block = 0; block < words_; block += kWordsInBlock) {
      const int64_t end = end_of(block);
      Vector<T> total = {};
      each_vector(row_, block, end, -kInfinity<T>, [&](int64_t i, Vector<T> x) {
        if (bias != nullptr) x = x + bias_at(bias, i);
        x = x * scale_;
        if (softcap_ != 0) x = tanh_of(x / softcap_) * softcap_;
        put(i, x);
        if (i + kLanes<T> > words_) x = without_rest(x, i, -kInfinity<T>);
        most = larger<T>(x, most);
        total += i + kLanes<T> > words_ ? without_rest(x, i, T(0)) : x;
      });
      total_ += sum_of_lanes<T>(total);
    }
    most_ = -kInfinity<T>;
    for (int i = 0; i < kLanes<T>; ++i)
      most_ = most[i] > most_ ? most[i] : most_;
  }

  Vector<T> bias_at(const T* bias, int64_t i) const {
    if (i + kLanes<T> <= words_) return load(bias + i);
    Vector<T> rest = {};
    for (int64_t j = 0; i + j < words_; ++j) rest[j] = bias[i + j];
    return rest;
  }

  Vector<T> without_rest(Vector<T> x, int64_t i, T filler) const {
    for (int64_t j = 0; j < kLanes<T>; ++j) {
      if (i + j >= words_) x[j] = filler;
    }
    return x;
  }

  bool is_first_of_greatest(T wanted) const {
    if (!(wanted == most_)) return false;
    for (int64_t i = 0; i < label_; ++i) {
      if (row_[i] == most_) return false;
    }
    return true;
  }

  /// Sums of exp(x - most), and of that times x - most. Without a softcap the
  /// exponentials stay, for the gradient.
  void add_up() {
    const bool keeps = args_.with_gradient && softcap_ == 0;
    const Vector<T> zero = {};
    for (int64_t block = 0; block < words_; block += kWordsInBlock) {
      Vector<T> sum = {}, weighted = {};
      each_vector(row_, block, end_of(block), -kInfinity<T>,
                  [&](int64_t i, Vector<T> x) {
                    const Vector<T> below = x - most_;
                    const Vector<T> e = exp_of(below);
                    sum += e;
                    weighted += e > zero ? e * below : zero;
                    if (keeps) put(i, e);
                  });
      sum_ += sum_of_lanes<T>(sum);
      weighted_ += sum_of_lanes<T>(weighted);
    }
  }

  void differentiate(T lse) {
    const TokenLossOptions& options = args_.options;
    const T weight = args_.weight == nullptr ? T(1) : args_.weight[token_];
    const T factor = weight * scale_;
    const T likely = factor * (1 + 2 * static_cast<T>(options.z_loss) * lse) /
                     static_cast<T>(sum_);
    const T smooth = factor * static_cast<T>(options.smoothing /
                                             static_cast<double>(words_));
    const T hit = factor * static_cast<T>(1 - options.smoothing);
    if (softcap_ == 0) {
      each_vector(row_, 0, words_, T(0),
                  [&](int64_t i, Vector<T> e) { put(i, e * likely - smooth); });
      row_[label_] -= hit;
      return;
    }
    const T capped = row_[label_] / softcap_;
    each_vector(row_, 0, words_, T(0), [&](int64_t i, Vector<T> x) {
      const Vector<T> t = x / softcap_;
      put(i, (exp_of(x - most_) * likely - smooth) * (T(1) - t * t));
    });
    row_[label_] -= hit * (1 - capped * capped);
  }

  int64_t end_of(int64_t block) const {
    return block + kWordsInBlock < words_ ? block + kWordsInBlock : words_;
  }

  const TokenLossArgs<T>& args_;
  int64_t token_, words_;
  T* row_;
  int64_t label_;
  T softcap_, scale_;
  T most_ = 0;
  double sum_ = 0, weighted_ = 0, total_ = 0;
};

template <class T>
void loss_of_rows(const TokenLossArgs<T>& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    LossRow<T>(args, token).run();
  }
}

}  // namespace
}  // namespace longspan
