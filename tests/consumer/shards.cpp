#include <ATen/ATen.h>
#include <longspan/torch.h>

int main() {
  const auto owners = longspan::Ownership::contiguous(8, 2);
  const at::Tensor tokens = at::arange(8);
  const at::Tensor mine = longspan::take_share(tokens, owners, 1, 0);
  if (!at::equal(mine, at::arange(4, 8))) return 1;

  const auto layout = longspan::AttentionLayout::of(
      longspan::Ownership::contiguous(8, 1),
      {longspan::Mask::causal(longspan::Packing::single(8))});
  const at::Tensor x = at::ones({8, 2, 4});
  const longspan::Attended answer =
      longspan::attend(x, x, x, layout, longspan::Group::solo());
  return at::allclose(answer.out, x) ? 0 : 1;
}
