"""Breaks the verification on purpose and requires the native tests to notice.

Copies the sources to a temporary folder, builds the native tests there once and checks that they
pass. Then, one mutant at a time: one exact replacement in one source file, a rebuild, the tests
that should catch it, the replacement undone. Exits 1 where a mutant survives.

    python scripts/mutants.py [--list | --check] [--only NAME ...] [--jobs N] [--keep FOLDER]

--check builds nothing: it tells, in a second, whether each mutant's text still occurs exactly once
and each of its tests' names still occurs at all.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from mutant_tree import Mutant, Tree, try_mutant, unfit

MUTANTS = [
    Mutant(
        "tie_to_the_higher_id",
        "src/cpu/body_vocab.h",
        "best.index = i + __builtin_ctz(equal);",
        "best.index = i + 31 - __builtin_clz(equal);",
        "lossless_where",
    ),
    Mutant(
        "bonus_from_the_wrong_row",
        "src/decode/decide.cpp",
        ": s.tree_row + node;\n  };",
        ": s.tree_row + node - (s.draft.has_children(node) ? 0 : 1);\n  };",
        "lossless",
    ),
    Mutant(
        "planner_climbs_hills",
        "src/decode/planner.cpp",
        "consider({rate_of(tokens, seconds), 0, tokens, seconds, depth, n}, plain, best);",
        "if (n > 1 && best.nodes == 0) return;\n"
        "      consider({rate_of(tokens, seconds), 0, tokens, seconds, depth, n}, plain, best);",
        "planner",
    ),
    Mutant(
        "planner_forgets_targets",
        "src/decode/planner.cpp",
        "const bool is_needed = node.place < needed_[node.candidate];",
        "const bool is_needed = false;",
        "planner",
    ),
    Mutant(
        "costs_believe_outliers",
        "src/decode/cost_model.cpp",
        "return std::clamp(std::log(seconds / expected), -CostModel::kMostSeen, "
        "CostModel::kMostSeen);",
        "return std::log(seconds / expected);",
        "cost_model",
    ),
    Mutant(
        "goodput_where_drafts_have_a_say",
        "src/decode/plan.cpp",
        "return looks_around && state.draft_changes_text ? Policy::brake : asked;",
        "return asked;",
        "policies",
    ),
    Mutant(
        "noise_by_step",
        "src/decode/decide.cpp",
        "s.length() + static_cast<std::int64_t>(s.walk.emitted().size());",
        "s.counters.rounds + static_cast<std::int64_t>(s.walk.emitted().size());",
        "lossless",
    ),
    Mutant(
        "path_not_compacted",
        "src/model/runner.cpp",
        "cache_.commit(id, path, moves_, tokens);\n  apply_moves();",
        "cache_.commit(id, path, moves_, tokens);",
        "lossless",
    ),
    Mutant(
        "kv_of_rejected_nodes_kept",
        "src/decode/round.cpp",
        "path.push_back(runner.scratch_of(s.tree_row + node));",
        "path.push_back(runner.scratch_of(s.tree_row + static_cast<std::int64_t>(path.size())));\n"
        "    (void)node;",
        "lossless",
    ),
    Mutant(
        "path_shifted_by_one",
        "src/core/kv_cache.cpp",
        "moves.push_back({group, scratch_slot(group, path[i]),",
        "moves.push_back({group, scratch_slot(group, path[i == 0 ? 0 : i - 1]),",
        "kv_cache",
    ),
    Mutant(
        "draft_cache_not_rolled_back",
        "src/decode/model_drafter.cpp",
        "std::int64_t same = std::min(state.agreed, most);",
        "std::int64_t same = most;",
        "draft_model",
    ),
    Mutant(
        "only_the_first_sibling",
        "src/decode/decide.cpp",
        "take(s, token, s.draft.child(node, token));",
        "std::int32_t child = s.draft.child(node, token);\n"
        "  for (std::int32_t i = node + 1; i < child; ++i) {\n"
        "    if (s.draft.parents()[static_cast<std::size_t>(i)] == node) child = -2;\n"
        "  }\n  take(s, token, child);",
        "lossless",
    ),
    Mutant(
        "accepted_without_a_check",
        "src/decode/decide.cpp",
        "take(s, token, s.draft.child(node, token));",
        "std::int32_t child = -2;\n"
        "  for (std::int32_t i = static_cast<std::int32_t>(s.draft.size()) - 1; i > node; --i) {\n"
        "    if (s.draft.parents()[static_cast<std::size_t>(i)] == node) child = i;\n"
        "  }\n  take(s, token, child);",
        "lossless",
    ),
    Mutant(
        "child_of_another_node",
        "src/core/draft_tree.cpp",
        "if (parents_[i] == node && tokens_[i] == token) return i;",
        "if (parents_[i] >= node && tokens_[i] == token) return i;",
        "walk_",
    ),
    Mutant(
        "stop_ignored_inside_an_accepted_run",
        "src/decode/verify.cpp",
        "if (is_stop) {",
        "if (is_stop && child < 0) {",
        "decoder_stop",
    ),
    Mutant(
        "stop_counts_only_first_in_a_round",
        "src/decode/decide.cpp",
        "const bool is_stop = s.is_stop(token);",
        "const bool is_stop = s.walk.emitted().empty() && s.is_stop(token);",
        "decoder_",
    ),
    Mutant(
        "length_before_stop",
        "src/decode/round.cpp",
        "if (s.walk.end() == WalkEnd::stop) s.finish = Finish::stop;",
        "if (s.walk.end() == WalkEnd::stop)\n"
        "    s.finish = s.tokens_left() == 0 ? Finish::length : Finish::stop;",
        "decoder_stop_and_length",
    ),
    Mutant(
        "tree_depth_by_node",
        "src/model/runner.cpp",
        "root + tree.depths()[node],",
        "root + 1 + static_cast<std::int64_t>(node),",
        "forward_tree",
    ),
    Mutant(
        "siblings_see_each_other",
        "src/model/runner.cpp",
        "parent == DraftTree::kRoot ? -1 : scratch + parent);",
        "node == 0 ? -1 : scratch + static_cast<std::int32_t>(node) - 1);",
        "forward_tree",
    ),
    Mutant(
        "shared_block_not_copied",
        "src/core/kv_cache.cpp",
        "moves.push_back({group, static_cast<std::int32_t>(old * layout_.block_size),",
        "if (old < 0) moves.push_back({group, static_cast<std::int32_t>(old * layout_.block_size),",
        "kv_cache",
    ),
    Mutant(
        "shared_window_block_counts_as_free",
        "src/core/kv_promises.cpp",
        "if (windowed) return std::min(reserved, held + lacking) - owned;",
        "if (windowed) return std::max<std::int64_t>(0, std::min(reserved - held, lacking));",
        "kv_cache",
    ),
    Mutant(
        "charge_lost_with_its_owner",
        "src/core/kv_promises.cpp",
        "if (own) {\n    pool.hand_over(block, other.id);",
        "if (own && false) {\n    pool.hand_over(block, other.id);",
        "kv_cache",
    ),
    Mutant(
        "hit_without_its_window",
        "src/core/kv_prefix.cpp",
        "if (unbroken[g] < blocks - first) complete = false;",
        "if (unbroken[g] < blocks - first - 1) complete = false;",
        "kv_cache",
    ),
    Mutant(
        "block_that_was_cut_stays_known",
        "src/core/kv_cache.cpp",
        "for (std::size_t g = 0; g < pools_.size(); ++g) forget_partial(sequence, g);",
        "",
        "kv_cache",
    ),
    Mutant(
        "window_of_the_last_known_token_let_go",
        "src/decode/model_drafter.cpp",
        "runner_.advance_keeping(a.draft.request->id, 1, known - 1);",
        "runner_.advance_keeping(a.draft.request->id, 1, known);",
        "draft_model",
    ),
    Mutant(
        "draft_cache_taken_for_filled",
        "src/decode/model_drafter.cpp",
        "if (runner_.rows() == 0) break;\n      runner_.forward();",
        "if (runner_.rows() == 0) break;",
        "draft_model_after_a_prefix_hit",
    ),
    Mutant(
        "draft_beyond_max_tokens",
        "src/decode/verify.cpp",
        "if (static_cast<std::int64_t>(emitted_.size()) == limit_) {",
        "if (static_cast<std::int64_t>(emitted_.size()) > limit_) {",
        "decoder_max_tokens",
    ),
    Mutant(
        "cut_rounds_counted_as_whole",
        "src/decode/sequence.cpp",
        "return sequence.pruned || sequence.walk.end() != WalkEnd::mismatch;",
        "return sequence.walk.end() != WalkEnd::mismatch;",
        "counters",
    ),
    Mutant(
        "one_logit_slice_only",
        "src/decode/decide.cpp",
        "while (waits_here(*s)) choose(*s",
        "if (waits_here(*s)) choose(*s",
        "lossless",
    ),
    Mutant(
        "rounding_depends_on_rows",
        "src/model/forward.cpp",
        "args.round_output = model_.precision() != Precision::f32;",
        "args.round_output = model_.precision() != Precision::f32 && rows_ > 1;",
        "forward_row",
    ),
    Mutant(
        "filter_keeps_every_tie",
        "src/decode/filter.cpp",
        "++ties > cut.ties) continue;",
        "++ties > cut.ties && at < 0) continue;",
        "filter_",
    ),
    Mutant(
        "filter_forgets_what_lies_above",
        "src/decode/filter.cpp",
        "    share.sum += before.sum;\n",
        "",
        "filter_",
    ),
    Mutant(
        "rows_see_the_rest_of_a_shared_chunk",
        "src/cpu/body_attention.h",
        "shares_[r] = first == 0 && count == kChunk ? Share::whole : Share::part;",
        "shares_[r] = first == 0 ? Share::whole : Share::part;",
        "attention_rows_keep",
    ),
    Mutant(
        "path_read_from_the_blocks",
        "src/cpu/body_attention.h",
        "} else if (begin + count > rows_[r].table_positions) {",
        "} else if (begin >= rows_[r].table_positions) {",
        "kernels_attention_win",
    ),
    Mutant(
        "segment_not_brought_to_the_common_maximum",
        "src/cpu/body_attention.h",
        "scale[1] = later_top - new_top;",
        "scale[1] = 0.0f;",
        "kernels_attention_win",
    ),
    Mutant(
        "one_scale_for_all_heads",
        "src/cpu/body_kv.h",
        "scales[h] =",
        "scales[0] =",
        "kernels_kv",
    ),
    Mutant(
        "scales_stay_behind_at_commit",
        "src/model/kv_storage.cpp",
        "for (std::size_t p = 0; p < group.planes.size(); ++p) {\n        const std::int64_t slot",
        "for (std::size_t p = 0; p < 2; ++p) {\n        const std::int64_t slot",
        "lossless_with_any",
    ),
    # Rejection sampling: each would change the law of the output.
    Mutant(
        "rejection_p_and_q_swapped",
        "src/decode/rejection.cpp",
        "if (u * double{q[id]} * p_mass < double{law[id]} * q_mass) return {token, child};",
        "if (u * double{law[id]} * q_mass < double{q[id]} * p_mass) return {token, child};",
        "rejection_keeps",
    ),
    Mutant(
        "rejection_residual_not_renormalised",
        "src/decode/rejection.cpp",
        "    p_mass = sum_of(law);\n    if (p_mass > 0.0) continue;",
        "    p_mass = sum_of(law) > 0.0 ? 1.0 : 0.0;\n    if (p_mass > 0.0) continue;",
        "rejection_keeps",
    ),
    Mutant(
        "rejection_coin_reused",
        "src/decode/rejection.cpp",
        "purpose_word(Purpose::accept), trial++);",
        "purpose_word(Purpose::accept), trial);",
        "rejection_keeps",
    ),
    Mutant(
        "rejection_siblings_residual_not_updated",
        "src/decode/rejection.cpp",
        "law[i] = left > 0.0 ? static_cast<float>(left) : 0.0f;",
        "(void)left;",
        "rejection_keeps",
    ),
    Mutant(
        "rejection_q_not_renormalised_without_replacement",
        "src/decode/rejection.cpp",
        "        q_mass = sum_of(q);\n",
        "",
        "rejection_keeps",
    ),
    Mutant(
        "rejection_unwarped_q",
        "src/decode/chain_draft.cpp",
        "tree->set_draw(Draw::without_replacement);\n    tree->set_distribution(parent, law);",
        "tree->set_draw(Draw::without_replacement);\n    SamplingParams raw = params;\n"
        "    raw.temperature = 1.0;\n"
        "    raw.top_k = 0;\n"
        "    tree->set_distribution(parent, chooser.distribution(row, raw));",
        "rejection_through",
    ),
    Mutant(
        "rejection_draft_reads_the_residuals_stream",
        "src/decode/chain_draft.cpp",
        ": purpose_word(Purpose::draft);",
        ": purpose_word(Purpose::residual);",
        "rejection_through",
    ),
    Mutant(
        "rejection_draft_by_place_in_the_batch",
        "src/decode/chain_draft.cpp",
        "position = start + static_cast<std::int64_t>(tree->size());",
        "position = start + static_cast<std::int64_t>(tree->size()) + request->id % 2;",
        "fuzz_",
    ),
    Mutant(
        "rank_keeps_the_winner",
        "src/decode/rank.cpp",
        "law[static_cast<std::size_t>(token)] = 0.0f;\n    run(best);",
        "law[static_cast<std::size_t>(token)] = 0.0f;",
        "rank_is",
    ),
    Mutant(
        "typical_parameters_swapped",
        "src/decode/typical.cpp",
        "return std::min(threshold, alpha * std::exp(-entropy));",
        "return std::min(alpha, threshold * std::exp(-entropy));",
        "typical_",
    ),
    Mutant(
        "typical_first_of_equal_lengths",
        "src/decode/typical.cpp",
        "(gain == 0 && likelihood_[node] > likelihood_[best_])",
        "(gain == 0 && likelihood_[node] > 0.0)",
        "typical_",
    ),
    Mutant(
        "typical_without_the_parent",
        "src/decode/typical.cpp",
        "if (accepted_[node_] == 0 || ends(node_)) continue;",
        "if (ends(node_)) continue;",
        "typical_",
    ),
    Mutant(
        "first_layers_behind_the_wrong_token",
        "src/decode/layers_drafter.cpp",
        "a.node = runner.scratch_of(a.row);",
        "if (a.node >= 0) a.node = runner.scratch_of(a.row);",
        "self_draft",
    ),
    Mutant(
        "block_coins_met_again",
        "src/decode/rejection.cpp",
        "purpose_word(Purpose::accept, round_start_)",
        "purpose_word(Purpose::accept)",
        "rejection_through",
    ),
    Mutant(
        "block_residual_of_the_plain_law",
        "src/decode/rejection.cpp",
        "last ? double{law[id]} : joint_ *",
        "last ? double{law[id]} : 1.0 *",
        "rejection_through",
    ),
    Mutant(
        "module_keeps_a_stale_state",
        "src/decode/head_modules.cpp",
        "if (before_[p].count > 0) {",
        "if (k > 0 && before_[p].count > 0) {",
        "head_drafter_catches_up",
    ),
    Mutant(
        "modules_after_the_first_not_chained",
        "src/decode/head_modules.cpp",
        "outputs = outputs_[k % 2];",
        "outputs = outputs_[0];",
        "head_modules",
    ),
    Mutant(
        "head_keys_without_first_tokens",
        "src/decode/head_features.h",
        "digit %= base_;",
        "digit = 0;",
        "head_keys",
    ),
    Mutant(
        "candidates_ranked_by_their_last_step",
        "src/decode/candidate_tree.cpp",
        "before + std::min(step, 0.0f), log_prob",
        "0.0f * before + std::min(step, 0.0f), log_prob",
        "candidate_tree",
    ),
    Mutant(
        "suffix_shorter_match_of_equals",
        "src/core/suffix_trie.cpp",
        "if (candidate.score >= out.score && ",
        "if (candidate.score > out.score && ",
        "suffix_trie",
    ),
    Mutant(
        "suffix_others_before_its_own_text",
        "src/decode/suffix_drafter.cpp",
        "if (other_.score > best_.score)",
        "if (other_.score >= best_.score)",
        "suffix_drafter",
    ),
    Mutant(
        "merge_believes_confidence",
        "src/decode/merge_drafter.cpp",
        "m.accepted[i], one.calibration.acceptance(\n                               m.of(i, part),",
        "m.accepted[i], double{m.of(i, part)} + 0.0 * one.calibration.acceptance(\n"
        "                               m.of(i, part),",
        "merge_",
    ),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--list", action="store_true", help="print the mutants' names")
    parser.add_argument("--check", action="store_true", help="whether each still fits the sources")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilations at once"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work there and leave it")
    options = parser.parse_args()
    names = [mutant.name for mutant in MUTANTS]
    if options.list:
        print("\n".join(names))
        return 0
    unknown = sorted(set(options.only or []) - set(names))
    if unknown:
        parser.error(f"[--only] expected names that --list prints, got {', '.join(unknown)}")
    chosen = [mutant for mutant in MUTANTS if not options.only or mutant.name in options.only]
    wrong = unfit(chosen)
    if wrong:
        sys.exit("\n".join(wrong))
    if options.check:
        print(f"{len(chosen)} mutants fit the sources")
        return 0

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        tree = Tree(folder, options.jobs)
        tree.configure()
        built = tree.compile()
        if built.returncode != 0:
            sys.exit(f"the sources do not build:\n{built.stdout}")
        # Every filter that is used has to pass, and to match something, on the sources as they are.
        for part in sorted({mutant.tests for mutant in chosen}):
            done = tree.test(part)
            if done.returncode != 0:
                sys.exit(f"the sources themselves fail *{part}*:\n{done.stdout}")
        survivors = 0
        for mutant in chosen:
            start = time.monotonic()
            caught, how = try_mutant(tree, mutant)
            survivors += not caught
            state = "caught" if caught else "SURVIVED"
            print(
                f"{mutant.name:36} {state:9} {time.monotonic() - start:5.0f} s  {how}", flush=True
            )
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
