//! Every behaviour, on the kernel and under the shim, in several variants: one test for each.
//!
//! `cargo test --test conformance -- epoll` runs the behaviours of one area. Names are
//! `area::behaviour::variant`:
//!
//! `THALLUS_TEST_PROGRAM` is the program `behaviour`, if not the one built with this test.
//! `THALLUS_TEST_DEADLINE` is the number of seconds after which a pair is said to hang, 30 if it is not set.
//!
//! | variant | the shim | |
//! |---|---|---|
//! | kernel | on neither side | two runs must tell the same |
//! | v4, v6, mapped | on both | the three address forms |
//! | swapped | on both | the other side listens |
//! | cold, lukewarm | on both | the upgrade comes in the middle of the behaviour |
//! | left-only, right-only | on one | nothing may change, nothing may leave TCP |
//! | verbs | on both | in a virtual machine of scripts/rdma-vm: over RDMA |
//! | one-write, two-writes, mixed | on both | the same, with messages written in one way, the other, or one by each side |
//! | named, named-to-left | on both, on one | a rule names the peer for RDMA, and there is no device |
//! | off | on both | nothing may leave TCP |
//! | one-processor | on both | who waits can't be answered before it lets others run |
//! | unix-kernel | on neither side | over `AF_UNIX`: two runs must tell the same |
//! | unix, unix-VARIANT | as in VARIANT | over `AF_UNIX` |
//! | limitation | on both | fails as docs/limitations.md says; if it does not, that page is wrong |

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use libtest_mimic::{Arguments, Failed, Trial};
use thallus_tests::behaviours::{AREAS, Behaviour, Tally, Transport};
use thallus_tests::calls::{Family, is_root};
use thallus_tests::harness::{Network, Preloaded, Run, Variant, check, check_on_kernel, run};

/// What does not work on an upgraded connection.
const LIMITATIONS: &str = include_str!("../../docs/limitations.md");

/// How long something is given that is known to hang.
const SOON: Duration = Duration::from_secs(3);

/// What is about shared memory, its rendezvous or settings that name it, or a known limitation between hosts.
const ONE_HOST: &[&str] = &[
    "hostile::",
    "unseen::",
    "connecting::by_shared_memory_only",
    "connecting::wrong_settings",
    "connecting::backend_of_another_user",
    // docs/limitations.md, "Between hosts": a process is killed that has not slept since it sent;
    "ending::killed_after_sending",
    "ending::killed_while_busy",
    "ending::a_mebibyte_then_killed",
    "killed::child_is_killed_while_busy",
    // bytes that were sent while the peer went back wait for the sender's next call;
    "processes::fork_while_a_thread_reads",
    // two processes use a connection from its first byte on.
    "processes::two_processes_before_the_upgrade",
    "processes::where_a_program_cannot_be_started",
    // what is unread counts as not acknowledged, and `TCP_CORK` has no effect;
    "options::corked_when_it_is_back",
    "options::what_has_arrived_is_not_left_to_send",
    // nobody notes when bytes come.
    "epoll_sets::in_the_order_of_arrival",
    // Greetings are behind what is unread; and how much TCP takes that nobody reads is the machine's.
    "leftovers::room_",
    "leftovers::exit_behind_much",
    "leftovers::kill_behind_much",
];

/// A client that connects to its own host's address: the server is elsewhere between two.
const OWN_ADDRESS: &str = "connecting::over_the_hosts_own_address";

/// What yields thousands of times between its calls: with one processor each yield takes a slice of whoever else is busy there, and
/// the kernel alone isn't done in time.
const YIELDING: &[&str] = &["switching::"];

/// What is about TCP, its ports and hosts, its rendezvous or its hints, and makes its connections accordingly.
const TCP: &[&str] = &[
    "connecting::",
    "hostile::",
    "inside_libc::",
    "lending::",
    "short_before::",
    "unaffected::",
    "unseen::",
];

/// What is run with each order in which messages may be written.
const ORDERED: &[&str] = &["sizes::", "returning::"];

/// Both sides of a pair spin while they wait, so more would only disturb each other.
const PAIRS_AT_ONCE: usize = 2;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(PAIRS_AT_ONCE);
    let trials = AREAS
        .iter()
        .flat_map(|(area, behaviours)| behaviours.iter().map(move |behaviour| (area, behaviour)))
        .flat_map(|(area, behaviour)| trials_of(format!("{area}::{}", behaviour.name), *behaviour))
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The variant that the others are made from.
fn usual() -> Variant {
    let seconds = std::env::var("THALLUS_TEST_DEADLINE").ok().and_then(|text| text.parse().ok());
    let patience = seconds.map_or(Variant::USUAL.patience, Duration::from_secs);
    Variant { patience, ..Variant::USUAL }
}

fn trials_of(name: String, behaviour: Behaviour) -> Vec<Trial> {
    if Network::of_environment().is_ok_and(|network| network != Network::Loopback) {
        return verbs_trials_of(name, behaviour);
    }
    if behaviour.between_hosts {
        return Vec::new();
    }
    if let Some(words) = behaviour.limitation {
        return limited_trials_of(name, behaviour, words);
    }
    let mut variants = tcp_variants_of(&name, &behaviour);
    variants.extend(unix_variants_of(&name, &behaviour));
    trials(name, behaviour, variants)
}

fn tcp_variants_of(name: &str, behaviour: &Behaviour) -> Vec<(&'static str, Variant, Preloaded)> {
    let usual = usual();
    if behaviour.over == Some(Transport::Unix) {
        return Vec::new();
    }
    let mut variants = vec![
        ("kernel", usual, Preloaded::Neither),
        ("v4", usual, Preloaded::Both),
        ("v6", Variant { family: Family::V6, ..usual }, Preloaded::Both),
        ("mapped", Variant { family: Family::Mapped, ..usual }, Preloaded::Both),
        ("left-only", usual, Preloaded::Left),
        ("right-only", usual, Preloaded::Right),
    ];
    if behaviour.by_itself {
        variants.retain(|(name, ..)| !name.ends_with("-only"));
    }
    if !YIELDING.iter().any(|prefix| name.starts_with(prefix)) {
        variants.push(("one-processor", Variant { one_processor: true, ..usual }, Preloaded::Both));
    }
    // As it is for users: what a behaviour does first, it does on connections that have done nothing yet.
    variants.push(("young", Variant { rounds: 0, upgrade_after: 8, ..usual }, Preloaded::Both));
    let named = Variant { named: true, ..usual };
    // Some have settings of their own for it.
    if behaviour.environment.iter().all(|(name, _)| *name != "THALLUS_FABRIC") {
        variants.push(("named", named, Preloaded::Both));
        if !behaviour.by_itself {
            variants.push(("named-to-left", named, Preloaded::Left));
        }
        variants.push(("off", Variant { off: true, ..usual }, Preloaded::Both));
    }
    if behaviour.takes_long {
        variants.retain(|(name, ..)| ["kernel", "v4"].contains(name));
    } else if behaviour.is_connected() {
        variants.push(("swapped", Variant { swapped: true, ..usual }, Preloaded::Both));
        variants.push(("cold", Variant { rounds: 0, ..usual }, Preloaded::Both));
        variants.push(("lukewarm", Variant { rounds: 2, ..usual }, Preloaded::Both));
    }
    variants
}

/// The same over `AF_UNIX`, where it holds.
fn unix_variants_of(name: &str, behaviour: &Behaviour) -> Vec<(&'static str, Variant, Preloaded)> {
    let usual = Variant { family: Family::Unix, ..usual() };
    if behaviour.over == Some(Transport::Tcp) || TCP.iter().any(|prefix| name.starts_with(prefix)) {
        return Vec::new();
    }
    let mut variants = vec![("unix-kernel", usual, Preloaded::Neither), ("unix", usual, Preloaded::Both)];
    if behaviour.takes_long {
        return variants;
    }
    if !behaviour.by_itself {
        variants.push(("unix-left-only", usual, Preloaded::Left));
        variants.push(("unix-right-only", usual, Preloaded::Right));
    }
    if !YIELDING.iter().any(|prefix| name.starts_with(prefix)) {
        variants.push(("unix-one-processor", Variant { one_processor: true, ..usual }, Preloaded::Both));
    }
    variants.push(("unix-young", Variant { rounds: 0, upgrade_after: 8, ..usual }, Preloaded::Both));
    if behaviour.is_connected() {
        variants.push(("unix-swapped", Variant { swapped: true, ..usual }, Preloaded::Both));
        variants.push(("unix-cold", Variant { rounds: 0, ..usual }, Preloaded::Both));
    }
    variants
}

/// Over verbs, which is slow under emulation: in one variant.
fn verbs_trials_of(name: String, mut behaviour: Behaviour) -> Vec<Trial> {
    let apart = Network::of_environment().is_ok_and(|network| network == Network::TwoHosts);
    let elsewhere = ONE_HOST.iter().any(|prefix| name.starts_with(prefix)) || apart && name == OWN_ADDRESS;
    if behaviour.limitation.is_some() || behaviour.over == Some(Transport::Unix) || elsewhere {
        return Vec::new();
    }
    behaviour.tally = behaviour.over_verbs.unwrap_or(behaviour.tally);
    if name.starts_with("switching::") && is_iwarp() {
        // It takes both sides some calls to connect a queue pair, and some of these connections end before.
        behaviour.tally = behaviour.tally.map(|tally| match tally {
            Tally::Upgraded(count @ 2..) => Tally::AtLeast(1, count),
            tally => tally,
        });
    }
    let mut variants = vec![("verbs", usual())];
    if ORDERED.iter().any(|prefix| name.starts_with(prefix)) {
        const ORDERS: [Option<&str>; 2] = [Some("one-write"), Some("two-writes")];
        variants = vec![
            ("one-write", Variant { orders: [ORDERS[0]; 2], ..usual() }),
            ("two-writes", Variant { orders: [ORDERS[1]; 2], ..usual() }),
            ("mixed", Variant { orders: ORDERS, ..usual() }),
        ];
    }
    let variants = variants.into_iter().map(|(name, variant)| (name, variant, Preloaded::Both));
    trials(name, behaviour, variants.collect())
}

/// Whether the virtual machine has Soft-iWARP.
fn is_iwarp() -> bool {
    let types = std::fs::read_dir("/sys/class/infiniband").into_iter().flatten().flatten();
    types
        .filter_map(|device| std::fs::read_to_string(device.path().join("node_type")).ok())
        .any(|kind| kind.contains("RNIC"))
}

fn trials(
    name: String,
    behaviour: Behaviour,
    variants: Vec<(&'static str, Variant, Preloaded)>,
) -> Vec<Trial> {
    variants
        .into_iter()
        .map(|(kind, variant, preloaded)| {
            let name = name.clone();
            Trial::test(format!("{name}::{kind}"), move || {
                conforms(&name, &behaviour, variant, preloaded).map_err(Failed::from)
            })
        })
        .collect()
}

/// Where it is not upgraded it works; where it is, it fails, and the documentation says so.
fn limited_trials_of(name: String, behaviour: Behaviour, words: &'static str) -> Vec<Trial> {
    let sides =
        [("kernel", Preloaded::Neither), ("left-only", Preloaded::Left), ("right-only", Preloaded::Right)];
    let family = if behaviour.over == Some(Transport::Unix) { Family::Unix } else { usual().family };
    let variant = Variant { family, ..usual() };
    let mut trials: Vec<Trial> = sides
        .into_iter()
        .map(|(kind, preloaded)| {
            let name = name.clone();
            Trial::test(format!("{name}::{kind}"), move || {
                conforms(&name, &behaviour, variant, preloaded).map_err(Failed::from)
            })
        })
        .collect();
    trials.push(limitation(name, behaviour, variant, words));
    trials
}

/// What is said of a behaviour that only root can run.
const NOT_RUN: &str = "only root can run this behaviour: it changes its user";

/// How [`thallus_tests`] says that a side has ended by SIGILL, SIGABRT, SIGBUS or SIGSEGV.
const CRASHES: [&str; 4] = ["Signal(4)", "Signal(6)", "Signal(7)", "Signal(11)"];

/// A trial in which the behaviour must fail, as the documentation says in `words`.
fn limitation(name: String, behaviour: Behaviour, variant: Variant, words: &'static str) -> Trial {
    Trial::test(format!("{name}::limitation"), move || {
        if !LIMITATIONS.contains(words) {
            return Err(format!("docs/limitations.md does not say {words}").into());
        }
        match conforms(&name, &behaviour, Variant { patience: SOON, ..variant }, Preloaded::Both) {
            Ok(()) => Err("it works: take it out of docs/limitations.md".into()),
            // No limitation is a crash, nor that it could not be run.
            Err(error) if error.contains(NOT_RUN) || CRASHES.iter().any(|crash| error.contains(crash)) => {
                Err(error.into())
            }
            Err(_) => Ok(()),
        }
    })
}

/// What the kernel does, found out once for all variants for which it is the same: it knows no warm-up.
fn on_kernel(
    name: &str,
    variant: Variant,
    run: impl FnOnce(Variant) -> Result<Run, String>,
) -> Result<Arc<Run>, String> {
    type Key = (String, Family, bool);
    static KNOWN: Mutex<BTreeMap<Key, Arc<Run>>> = Mutex::new(BTreeMap::new());
    let key = (name.to_owned(), variant.family, variant.swapped);
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(run) = known().get(&key) {
        return Ok(Arc::clone(run));
    }
    let run = Arc::new(run(Variant { rounds: Variant::USUAL.rounds, ..variant })?);
    known().insert(key, Arc::clone(&run));
    Ok(run)
}

fn conforms(name: &str, behaviour: &Behaviour, variant: Variant, preloaded: Preloaded) -> Result<(), String> {
    if behaviour.needs_root && !is_root() {
        return Err(NOT_RUN.to_owned());
    }
    let program = std::env::var_os("THALLUS_TEST_PROGRAM").unwrap_or(env!("CARGO_BIN_EXE_behaviour").into());
    let run_with = |variant, preloaded| {
        run(Path::new(&program), name, behaviour, variant, preloaded).map_err(|error| format!("{error:#}"))
    };
    let kernel = on_kernel(name, variant, |variant| run_with(variant, Preloaded::Neither))?;
    let other = run_with(variant, preloaded)?;
    if preloaded == Preloaded::Neither {
        check_on_kernel(behaviour, &kernel, &other)
    } else {
        check(behaviour, variant, preloaded, &kernel, &other)
    }
}
