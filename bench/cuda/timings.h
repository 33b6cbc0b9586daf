#pragma once

/// The words of cuda_kernel_bench. `all` takes times at long sizes too.
namespace longspan::bench {

void time_attention(bool all);
void time_attention_backward(bool all);
void time_attention_of_any_shape(bool all);
void time_select(bool all);
void time_select_on_ampere(bool all);
void time_scores(bool all);
void profile_select(bool all);

}  // namespace longspan::bench
