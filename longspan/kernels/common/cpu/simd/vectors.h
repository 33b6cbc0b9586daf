#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstdint>

/// Vectors of the width that the including source is compiled for.
///
/// Everything in this folder has internal linkage: each instruction set
/// compiles its own copy, and none may be shared between them. Include it from
/// the sources named attention_<instruction set>.cpp only, and keep templates
/// and inline functions of others out.
namespace longspan {
namespace {

// A tile of sums takes most of the registers, so that a multiply-add needs as
// few loads as can be: 11 for 24 with 8 x 3. More columns would no longer leave
// a panel of B in the first cache, more rows need more registers for addresses
// than there are.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kTileRows = 8, kTileVectors = 3;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kTileRows = 6, kTileVectors = 2;
#else
constexpr int kVectorBytes = 16;
constexpr int kTileRows = 4, kTileVectors = 2;
#endif

template <class T>
struct VectorTypes;

template <>
struct VectorTypes<float> {
  using Integer = int32_t;
  typedef float Values __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<double> {
  using Integer = int64_t;
  typedef double Values __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integers __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Bits __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vector = typename VectorTypes<T>::Values;

/// A comparison of vectors: all bits or none in each lane.
template <class T>
using Choice = typename VectorTypes<T>::Integers;

template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());

template <class T>
inline Vector<T> load(const T* from) {
  Vector<T> vector;
  __builtin_memcpy(&vector, from, sizeof vector);
  return vector;
}

template <class T>
inline void store(T* to, Vector<T> vector) {
  __builtin_memcpy(to, &vector, sizeof vector);
}

/// Written as a subtraction because that compiles to a broadcast alone:
/// x - 0 is x for every x, while 0 + x is not for -0.
template <class T>
inline Vector<T> all_lanes(T value) {
  return value - Vector<T>{};
}

/// a * b + c, rounded once where the level can. Written out because a compiler
/// fuses a product and a sum in one place and not in another, and what is
/// summed must have the same bits in all.
inline Vector<float> multiply_add(Vector<float> a, Vector<float> b,
                                  Vector<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
inline Vector<double> multiply_add(Vector<double> a, Vector<double> b,
                                   Vector<double> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

/// The length of a scratch row of n elements, in elements: whole cache lines,
/// and an odd number of them, so that a column of rows spreads over the cache.
template <class T>
inline int64_t row_length(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  return ((n + kLine - 1) / kLine | 1) * kLine;
}

/// n, rounded up to whole vectors.
template <class T>
inline int whole_vectors(int n) {
  return (n + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

}  // namespace
}  // namespace longspan
