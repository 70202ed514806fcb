#include "tools/caches/symmetric_eigen.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace keyhole::tools {
namespace {

constexpr int kMostSweeps = 60;

/// The rotation in the plane of p and q that makes a[p, q] zero.
struct PlaneRotation {
  double c = 1.0, s = 0.0;
  PlaneRotation(double pp, double qq, double pq) {
    const double theta = (qq - pp) / (2.0 * pq);
    const double t = (theta >= 0.0 ? 1.0 : -1.0) / (std::abs(theta) + std::hypot(theta, 1.0));
    c = 1.0 / std::hypot(t, 1.0);
    s = t * c;
  }
  void turn(double& x, double& y) const {
    const double old = x;
    x = c * old - s * y;
    y = s * old + c * y;
  }
};

}  // namespace

std::vector<double> symmetric_eigenvectors(std::vector<double> matrix, size_t n) {
  std::vector<double>& a = matrix;
  std::vector<double> rows(n * n);  // eigenvectors as rows, which lie together
  for (size_t i = 0; i < n; ++i) rows[i * n + i] = 1.0;
  double all = 0.0;
  for (const double x : a) all += x * x;
  for (int sweep = 0; sweep < kMostSweeps; ++sweep) {
    double off = 0.0;
    for (size_t p = 0; p < n; ++p) {
      for (size_t q = p + 1; q < n; ++q) off += a[p * n + q] * a[p * n + q];
    }
    if (off <= 1e-28 * all) break;
    for (size_t p = 0; p < n; ++p) {
      for (size_t q = p + 1; q < n; ++q) {
        if (std::abs(a[p * n + q]) <= 1e-300) continue;
        const PlaneRotation plane(a[p * n + p], a[q * n + q], a[p * n + q]);
        for (size_t k = 0; k < n; ++k) plane.turn(a[k * n + p], a[k * n + q]);
        for (size_t k = 0; k < n; ++k) plane.turn(a[p * n + k], a[q * n + k]);
        for (size_t k = 0; k < n; ++k) plane.turn(rows[p * n + k], rows[q * n + k]);
      }
    }
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t i, size_t j) { return a[i * n + i] > a[j * n + j]; });
  std::vector<double> out(n * n);
  for (size_t j = 0; j < n; ++j) {
    for (size_t i = 0; i < n; ++i) out[i * n + j] = rows[order[j] * n + i];
  }
  return out;
}

}  // namespace keyhole::tools
