//! The laws: what attention must give, on every instruction set. One program, so that the generic code of the library is compiled once for all of
//! them; what needs a process of its own (a counting allocator, environment variables, no thread pool) lies beside it.

#[path = "../common/mod.rs"]
mod common;

mod audit;
mod bf16_pairs;
mod bits;
mod decode;
mod element_types;
mod error_variants;
mod errors;
mod faults;
mod found;
#[cfg(unix)]
mod guard_pages;
#[cfg(unix)]
mod guard_pages_calls;
#[cfg(unix)]
mod guarded;
mod kv_cache;
mod kv_cache_errors;
mod masks;
mod merge;
mod modifiers;
#[cfg(feature = "multi-head")]
mod multi_head;
#[cfg(feature = "multi-head")]
mod multi_head_errors;
#[cfg(feature = "multi-head")]
mod multi_head_model;
#[cfg(feature = "multi-head")]
mod multi_head_rotary;
#[cfg(feature = "multi-head")]
mod multi_head_steps;
mod non_finite;
mod proptest_reference;
mod real_model;
mod semantics;
mod sizes;
mod varlen;
mod weights;
