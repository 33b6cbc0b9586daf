#include <ATen/ATen.h>
#include <longspan/models.h>

/// Two documents of ones that are added up: 1, 2, 3, 4, 5, and 1, 2, 3 anew.
int main() {
  const auto layout = longspan::AttentionLayout::of(
      longspan::Ownership::contiguous(8, 1),
      {longspan::Mask::causal(longspan::Packing::of({5, 3}))});
  const longspan::LayerShare share(layout, longspan::Group::solo());
  const at::Tensor one = at::ones({8, 1, 1});
  const at::Tensor out = longspan::mamba2_scan(
      {one, one.squeeze(2), at::zeros({1}), one, one, {}}, share);
  const at::Tensor expected = at::tensor({1, 2, 3, 4, 5, 1, 2, 3}, at::kFloat);
  return at::allclose(out.flatten(), expected) ? 0 : 1;
}
