// Products of matrices, with the same bits for a row however many rows there are.

#ifndef TINSMITH_PRODUCTS_H_
#define TINSMITH_PRODUCTS_H_

#include <cstdint>

#include "vectors.h"

namespace tinsmith {

// Numbers [row, column] that are `row` apart from row to row, and `column` from column to column.
template <typename T>
struct Strided {
  const T* at;
  int64_t row, column = 1;
  Strided from(int64_t r) const { return {at + r * row, row, column}; }
};

// y [rows, width] (+)= x [rows, inputs] w [inputs, width]. `w_row` and `y_row` are the distances of their rows. Each
// number is one sum over the inputs in their order, to which what was there is added at the end. Numbers of bfloat16
// are widened; a multiple of 16 columns suits vectors of any length.
void product(Strided<float> x, int64_t rows, const float* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
             int64_t width, bool adds = false);
void product(Strided<float> x, int64_t rows, const Narrow* w, int64_t w_row, int64_t inputs, float* y, int64_t y_row,
             int64_t width, bool adds = false);

// The same of bfloat16, with two inputs at a time: x [rows, pairs], and either w [2 pairs, width] or w [pairs, width],
// in multiples of 32 and 16 columns, which suit vectors of any length.
void product(Strided<Pair> x, int64_t rows, const Narrow* w, int64_t w_row, int64_t pairs, float* y, int64_t y_row,
             int64_t width, bool adds = false);
void product(Strided<Pair> x, int64_t rows, const Pair* w, int64_t w_row, int64_t pairs, float* y, int64_t y_row,
             int64_t width, bool adds = false);

// y [rows, width] = x [rows, inputs] times w [width, inputs] transposed; of pairs, a multiple of 16. Numbers of bfloat16
// are widened.
void dots(const float* x, int64_t x_row, int64_t rows, const float* w, int64_t w_row, int64_t inputs, float* y,
          int64_t y_row, int64_t width);
void dots(const float* x, int64_t x_row, int64_t rows, const Narrow* w, int64_t w_row, int64_t inputs, float* y,
          int64_t y_row, int64_t width);
void dots(const Pair* x, int64_t x_row, int64_t rows, const Pair* w, int64_t w_row, int64_t pairs, float* y,
          int64_t y_row, int64_t width);

}  // namespace tinsmith

#endif  // TINSMITH_PRODUCTS_H_
