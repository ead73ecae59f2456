//! Runs the two sides of a behaviour as processes, within a deadline, and judges what they left.

mod diagnosis;
mod library;
mod pair;
mod postgres;
mod scene;
mod stats;
mod turns;
mod verdict;

pub use diagnosis::{end_group, group_members, report};
pub use library::library;
pub(crate) use pair::keep_inherited_descriptors_here;
pub use pair::{Network, Preloaded, Report, Run, Variant, run};
pub use postgres::Postgres;
pub use scene::{Output, Scene, Service, free_port, program};
pub use stats::{Stats, TOO_SHORT, read_stats};
pub use turns::{Turn, turn};
pub use verdict::{check, check_on_kernel};

/// How a transcript line begins whose number may differ, but must not be smaller under the shim.
pub const AT_LEAST: &str = "at least ";
