// Direct calls of PyTorch's BLAS. For small products, dispatcher, checks and tensors would cost more than the product.
#include "boundary/shim.h"

#include <initializer_list>
#include <limits>

#ifdef _MSC_VER

// This compiler has no weak symbols.
extern "C" int32_t ttc_multiply(const TtProduct*) { return 0; }

#else

extern "C" {

// The symbols are weak, because some builds of PyTorch do not export these functions.
__attribute__((weak)) void sgemm_(const char*, const char*, const int*, const int*, const int*, const float*,
                                  const float*, const int*, const float*, const int*, const float*, float*, const int*);
__attribute__((weak)) void dgemm_(const char*, const char*, const int*, const int*, const int*, const double*,
                                  const double*, const int*, const double*, const int*, const double*, double*,
                                  const int*);
__attribute__((weak)) int MKL_Set_Num_Threads_Local(int);
}

namespace {

// Makes MKL run on the calling thread only, for the lifetime of the object.
class Alone {
 public:
  Alone() {
    if (MKL_Set_Num_Threads_Local) before_ = MKL_Set_Num_Threads_Local(1);
  }
  ~Alone() {
    if (MKL_Set_Num_Threads_Local) MKL_Set_Num_Threads_Local(before_);
  }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  int before_ = 0;
};

// Matrices are row-major, but BLAS expects column-major matrices. So this function computes the transposed product: c'
// = b' a'.
template <class T, class Gemm>
void multiply(Gemm gemm, const TtProduct& p) {
  const Alone alone;
  const int m = static_cast<int>(p.m), n = static_cast<int>(p.n), k = static_cast<int>(p.k);
  const int lda = static_cast<int>(p.a.ld), ldb = static_cast<int>(p.b.ld), ldc = static_cast<int>(p.c.ld);
  const T alpha = static_cast<T>(p.alpha), beta = static_cast<T>(p.beta);
  const char ta = p.a.transposed ? 'T' : 'N', tb = p.b.transposed ? 'T' : 'N';
  gemm(&tb, &ta, &n, &m, &k, &alpha, static_cast<const T*>(p.b.data), &ldb, static_cast<const T*>(p.a.data), &lda,
       &beta, static_cast<T*>(p.c.data), &ldc);
}

}  // namespace

extern "C" int32_t ttc_multiply(const TtProduct* p) {
  if (!sgemm_ || !dgemm_) return 0;
  for (const int64_t size : {p->m, p->n, p->k, p->a.ld, p->b.ld, p->c.ld})
    if (size > std::numeric_limits<int>::max()) return 0;
  if (p->is_double)
    multiply<double>(dgemm_, *p);
  else
    multiply<float>(sgemm_, *p);
  return 1;
}

#endif
