//! Spinning: looking at memory for a while before a sleep, where that has paid lately.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::arena::now_ns;
use crate::settings::settings;

/// How long one connection, or one set of them, spins: it follows how soon data used to come.
///
/// A wait is short if the longest spin would have ended it. Of the last eight, one short one may be chance; from two on the next
/// wait spins, and from four on as long as it may. Each long wait in a row halves that, down to none. Where any short wait
/// brought back the longest spin, 50 clients of a database whose backends wait shortly once in 13 times spent a tenth of the
/// processors on it. But two peers that both sleep before each message wait for two wake-ups each time, and would never find
/// out that they need not. So a waiter that does not spin tries it now and then, ever less often while that fails; if it
/// does not fail, the next spins are the longest again.
#[derive(Debug)]
pub struct Patience {
    /// The last [`REMEMBERED`] waits, the last one lowest: set if short.
    recent: AtomicU32,
    /// Waits since the last trial, and how many there are to be.
    waits: AtomicU32,
    trial_after: AtomicU32,
    /// Waits that the kernel's own descriptors have ended, less those that memory has.
    foreign: AtomicU32,
}

/// Waits that are remembered, and all of them short.
const REMEMBERED: u32 = 8;
const ALL_SHORT: u32 = (1 << REMEMBERED) - 1;
/// Long waits in a row after which nobody spins.
const MOST_LONG: u32 = 5;

/// Waits that the kernel ended, less those that memory did, from which on a set does not spin, and most that are counted.
const FOREIGN: [u32; 2] = [8, 16];

/// Waits without a spin before the first trial, and most of them between two.
const TRIALS: [u32; 2] = [32, 4096];

impl Default for Patience {
    fn default() -> Self {
        Self::new()
    }
}

impl Patience {
    /// Full patience, until experience says otherwise.
    pub fn new() -> Self {
        Self {
            recent: AtomicU32::new(ALL_SHORT),
            waits: AtomicU32::new(0),
            trial_after: AtomicU32::new(TRIALS[0]),
            foreign: AtomicU32::new(0),
        }
    }

    /// A wait for several has ended: because of one in memory, or of a descriptor that `foreign` tells is the kernel's. For that
    /// the kernel would have ended a sleep as soon as without this library, and at no cost to whoever needs the processor.
    pub fn ended(&self, foreign: bool) {
        let count = self.foreign.load(Ordering::Relaxed);
        let now = if foreign { (count + 1).min(FOREIGN[1]) } else { count.saturating_sub(1) };
        if now != count {
            self.foreign.store(now, Ordering::Relaxed);
        }
    }

    /// Longest spin of the wait that begins now, in nanoseconds.
    pub fn allowance_ns(&self) -> u64 {
        if self.foreign.load(Ordering::Relaxed) >= FOREIGN[0] {
            return 0;
        }
        let budget = self.budget_ns();
        if budget > 0 {
            return budget;
        }
        let (waits, trial) =
            (self.waits.load(Ordering::Relaxed) + 1, self.trial_after.load(Ordering::Relaxed));
        if waits < trial {
            self.waits.store(waits, Ordering::Relaxed);
            return 0;
        }
        self.waits.store(0, Ordering::Relaxed);
        self.trial_after.store(trial.saturating_mul(2).min(TRIALS[1]), Ordering::Relaxed);
        settings().spin_ns
    }

    /// Spins until `done` or out of patience.
    pub fn spin(&self, mut done: impl FnMut() -> bool) -> Spin {
        let spin = spin_for(self.allowance_ns(), None, |_| done());
        if spin == Spin::Done {
            self.restore();
        }
        spin
    }

    fn budget_ns(&self) -> u64 {
        let (recent, longest) = (self.recent.load(Ordering::Relaxed), settings().spin_ns);
        let usual = match recent.count_ones() {
            0 | 1 => 0,
            2 => longest / 8,
            3 => longest / 2,
            _ => longest,
        };
        match recent.trailing_zeros() {
            long if long < MOST_LONG => usual.min(longest >> long),
            _ => 0,
        }
    }

    /// Spinning has ended a wait.
    pub fn restore(&self) {
        self.note(if self.budget_ns() == 0 {
            ALL_SHORT
        } else {
            self.recent.load(Ordering::Relaxed) << 1 | 1
        });
    }

    fn note(&self, recent: u32) {
        let recent = recent & ALL_SHORT;
        if self.recent.load(Ordering::Relaxed) != recent {
            self.recent.store(recent, Ordering::Relaxed);
            if recent & 1 != 0 {
                self.trial_after.store(TRIALS[0], Ordering::Relaxed);
            }
        }
    }

    /// Learns from a wait that ends now, and that `spin` did not end.
    pub fn learn(&self, spin: Spin) {
        let is_short = |since: Instant| since.elapsed() < Duration::from_nanos(settings().spin_ns);
        let was_short = match spin {
            Spin::Vain(since) => is_short(since),
            Spin::Declined(since) if is_short(since) => true,
            Spin::Failed => false,
            Spin::Done | Spin::Declined(_) | Spin::Unknown => return,
        };
        self.note(self.recent.load(Ordering::Relaxed) << 1 | u32::from(was_short));
    }
}

/// Looks between two yields, some microseconds in all.
const LOOKS: u32 = 48;
/// Looks before the first yield: what is already on its way arrives meanwhile.
const FIRST_LOOKS: u32 = 24;
/// A yield that took longer gave the processor to somebody else.
const LONG_YIELD: Duration = Duration::from_nanos(1500);
/// Long yields in a row that brought nothing, after which a sleep and a bell would have cost less.
const VAIN_YIELDS: u32 = 16;

/// Longest spin of all, others' time included: a signal that arrives meanwhile ends no call.
pub const LONGEST: Duration = Duration::from_millis(5);

/// How [`spin_for`] ended; if what was waited for has not come, with the time since when it is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spin {
    /// What was waited for has come.
    Done,
    /// It has not.
    Vain(Instant),
    /// Nobody waited: on these processors sleeping is the better way now.
    Declined(Instant),
    /// It has not come while others that wanted to run did; how long it takes now would tell of them.
    Failed,
    /// Nobody waited, nor would the time tell anything, as of [`Spin::Failed`].
    Unknown,
}

/// What spins have brought this process, and what they have cost, in nanoseconds. Whoever has been in debt for a while retreats for some
/// waits, and for twice as many the next time. Threads that meet here may lose an entry.
struct Account {
    balance: AtomicI64,
    /// Since when it is in debt, by the clock of [`now_ns`]; 0: it is not. And the entries since.
    indebted_since: AtomicU64,
    indebted_for: AtomicU32,
    /// Waits that the retreat still lasts, and how many the next one lasts.
    retreat: AtomicU32,
    lesson: AtomicU32,
    terms: Terms,
}

struct Terms {
    /// Most that can be saved up, and owed: times change, and must be noticed soon.
    most: i64,
    /// How long one may be in debt, in nanoseconds, and for how many entries at least: where waits are long, few are made in any time.
    grace: u64,
    entries: u32,
    /// Waits of the first retreat, and of the longest.
    lessons: [u32; 2],
}

impl Account {
    const fn new(terms: Terms) -> Self {
        Self {
            balance: AtomicI64::new(0),
            indebted_since: AtomicU64::new(0),
            indebted_for: AtomicU32::new(0),
            retreat: AtomicU32::new(0),
            lesson: AtomicU32::new(terms.lessons[0]),
            terms,
        }
    }

    fn is_retreating(&self) -> bool {
        self.retreat.load(Ordering::Relaxed) > 0
    }

    /// Whether the wait that begins now is one of a retreat.
    fn retreats(&self) -> bool {
        let retreat = self.retreat.load(Ordering::Relaxed);
        if retreat > 0 {
            self.retreat.store(retreat - 1, Ordering::Relaxed);
        }
        retreat > 0
    }

    fn book(&self, gain_ns: i64) {
        let most = self.terms.most;
        let before = self.balance.load(Ordering::Relaxed);
        let balance = before.saturating_add(gain_ns).clamp(-most, most);
        if balance >= 0 {
            // Most entries are gains of who has enough, and others use what is beside it.
            if balance != before {
                self.balance.store(balance, Ordering::Relaxed);
                self.indebted_since.store(0, Ordering::Relaxed);
                if balance == most {
                    self.lesson.store(self.terms.lessons[0], Ordering::Relaxed);
                }
            }
            return;
        }
        self.balance.store(balance, Ordering::Relaxed);
        let now = now_ns();
        let (since, entries) = match self.indebted_since.load(Ordering::Relaxed) {
            0 => (now, 1),
            since => (since, self.indebted_for.load(Ordering::Relaxed).saturating_add(1)),
        };
        if now.saturating_sub(since) < self.terms.grace || entries < self.terms.entries {
            self.indebted_since.store(since, Ordering::Relaxed);
            self.indebted_for.store(entries, Ordering::Relaxed);
            return;
        }
        self.balance.store(0, Ordering::Relaxed);
        self.indebted_since.store(0, Ordering::Relaxed);
        let lesson = self.lesson.load(Ordering::Relaxed);
        self.retreat.store(lesson, Ordering::Relaxed);
        self.lesson.store(lesson.saturating_mul(2).min(self.terms.lessons[1]), Ordering::Relaxed);
    }
}

/// Whether to yield, or to sleep at once. Spinning steals from whoever wants to run, and the kernel does not say whether anyone
/// does. A yield tells: it returns at once when nobody else is runnable here. If others are, and they are our peers, yielding is
/// far cheaper than bells. But a task that yields goes behind all others (Linux 6.18 makes it forfeit its slice): among programs
/// that never yield it loses milliseconds each time. So a yield that others answered soon, or after which what was waited for came, is worth
/// [`GAIN_NS`], one that took longer than [`ROBBED`] costs its time. Not every such loss is a crowd's: a hypervisor takes its time, too, and a
/// sleep would not have spared it. Who finds what it waits for in between has saved up for that.
static CROWD: Account = Account::new(Terms { most: 10_000_000, grace: 0, entries: 0, lessons: [64, 4096] });

/// What yielding saves instead of sleeping: two wake-ups' time of a processor.
const GAIN_NS: i64 = 20_000;
/// Who lets others run loses no more than this among peers that wait for each other.
const ROBBED: Duration = Duration::from_millis(1);

/// Whether spins among others are worth their own time. Where many want to run, one lets several others run before its turn comes
/// with something; and a yield gives way only to tasks of the same group (`sched_autogroup`, control groups): to others the
/// scheduler comes in its own time, and until then the waiter looks in vain. So a spin in which others have run costs the time of
/// its yields, and what it looked in vain twice, for that was taken from them, too: until the last of them ran, if it brought something
/// after that, for then nobody wanted to. One that brought something is worth [`SLEEP_NS`], among others or alone. The grace is for two peers
/// that meet on one processor while another is idle: the scheduler parts them, if they do not sleep. In a retreat a spin goes on only as
/// long as others do run, and for [`FRUGAL_YIELDS`], and is worth nothing: such a one costs so little that soon each retreat would be the
/// shortest again.
///
/// A database's backend that wakes a writer of its log with each transaction, and so has others run in one spin of seven, was in debt by that
/// one where gains counted only in debt; with few waits in the time of grace, as on a virtual machine whose host was busy, it retreated
/// again and again, and 4,000 transactions per second became 600.
static EFFORT: Account =
    Account::new(Terms { most: 32 * SLEEP_NS, grace: 20_000_000, entries: 64, lessons: [1024, 32_768] });

/// What a sleep and a bell cost at both ends, of processors' time.
const SLEEP_NS: i64 = 16_000;
/// As [`VAIN_YIELDS`], in a retreat.
const FRUGAL_YIELDS: u32 = 3;

/// Spins for up to `budget_ns` of this thread's own time until `done`, which is told whether others have just run for a
/// while; in all no longer than `limit`. Alone on its processor a thread just looks; if there are others it lets
/// them run: the peer may be among them.
pub fn spin_for(budget_ns: u64, limit: Option<Duration>, done: impl FnMut(bool) -> bool) -> Spin {
    if budget_ns == 0 {
        return no_spin();
    }
    spin_by(&CROWD, &EFFORT, Duration::from_nanos(budget_ns), limit.unwrap_or(LONGEST).min(LONGEST), done)
}

/// A wait that does not spin begins.
pub fn no_spin() -> Spin {
    if EFFORT.retreats() { Spin::Unknown } else { Spin::Vain(Instant::now()) }
}

fn spin_by(
    crowd: &Account,
    effort: &Account,
    budget: Duration,
    limit: Duration,
    mut done: impl FnMut(bool) -> bool,
) -> Spin {
    if look(FIRST_LOOKS, &mut done) {
        if !effort.is_retreating() {
            effort.book(SLEEP_NS);
        }
        return Spin::Done;
    }
    let start = Instant::now();
    if crowd.retreats() {
        return Spin::Declined(start);
    }
    let retreats = effort.retreats();
    let (looks, most_vain) = if retreats { (1, FRUGAL_YIELDS) } else { (LOOKS, VAIN_YIELDS) };
    let budget = budget.min(limit);
    let mut before = start;
    let (mut spent, mut yielded, mut vain) = (Duration::ZERO, Duration::ZERO, 0);
    // Of what was spent, what others may have waited for.
    let mut contested = Duration::ZERO;
    let mut found = false;
    while spent < budget {
        rustix::thread::sched_yield();
        let after = Instant::now();
        let took = after.duration_since(before);
        if took < LONG_YIELD {
            found = look(looks, &mut done);
            let now = Instant::now();
            spent += now.duration_since(before);
            before = now;
            if found {
                crowd.book(GAIN_NS);
            }
            if found || retreats {
                break;
            }
            continue;
        }
        spent += LONG_YIELD;
        yielded += LONG_YIELD;
        contested = spent;
        before = after;
        found = done(true);
        if found || took >= ROBBED {
            crowd.book(if took >= ROBBED { -nanoseconds(took) } else { GAIN_NS });
            break;
        }
        vain += 1;
        if vain == most_vain || after.duration_since(start) >= limit {
            break;
        }
    }
    let (worth, taken) = if found { (SLEEP_NS, contested) } else { (0, spent) };
    if !retreats {
        let cost = if yielded > Duration::ZERO { taken + taken - yielded } else { Duration::ZERO };
        effort.book(worth - nanoseconds(cost));
    }
    match found {
        true => Spin::Done,
        false if retreats => Spin::Failed,
        false => Spin::Vain(start),
    }
}

fn look(times: u32, done: &mut impl FnMut(bool) -> bool) -> bool {
    (0..times).any(|_| {
        let found = done(false);
        if !found {
            std::hint::spin_loop();
        }
        found
    })
}

fn nanoseconds(time: Duration) -> i64 {
    i64::try_from(time.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn patience_follows_what_waits_are_like() {
        let longest = settings().spin_ns;
        let long = || {
            Spin::Vain(
                Instant::now().checked_sub(Duration::from_secs(1)).expect("the machine runs for a second"),
            )
        };
        let short = || Spin::Vain(Instant::now());
        let patience = Patience::new();
        let after = |wait: Spin| {
            patience.learn(wait);
            patience.budget_ns()
        };
        let budgets: Vec<u64> = (0..6).map(|_| after(long())).collect();
        assert_eq!(budgets, [longest / 2, longest / 4, longest / 8, longest / 16, 0, 0]);
        // Two of eight were short, and still are; then three, then four.
        let budgets: Vec<u64> = (0..4).map(|_| after(short())).collect();
        assert_eq!(budgets, [longest / 8, longest / 8, longest / 2, longest]);
        // One of many is chance.
        (0..8).for_each(|_| patience.learn(long()));
        assert_eq!(
            [after(short()), after(long()), after(short()), after(short())],
            [0, 0, longest / 8, longest / 2]
        );
        // Nobody tried.
        let Spin::Vain(since) = long() else { unreachable!() };
        assert_eq!(after(Spin::Declined(since)), longest / 2);
        // A trial that has found something.
        (0..8).for_each(|_| patience.learn(long()));
        patience.restore();
        assert_eq!(patience.budget_ns(), longest);
    }

    #[test]
    fn a_set_that_the_kernel_wakes_more_often_than_memory_does_not_spin() {
        let patience = Patience::new();
        let spins = |kernel: u32, memory: u32| {
            (0..kernel).for_each(|_| patience.ended(true));
            (0..memory).for_each(|_| patience.ended(false));
            patience.allowance_ns() > 0
        };
        assert_eq!([spins(7, 0), spins(1, 0), spins(0, 1), spins(100, 8)], [true, false, true, false]);
        assert_eq!([spins(0, 1), spins(1, 1), spins(2, 1)], [true, true, false]);
    }

    #[test]
    fn a_waiter_that_does_not_spin_tries_it_ever_less_often() {
        let patience = Patience::new();
        patience.recent.store(0, Ordering::Relaxed);
        let mut gaps = vec![];
        while gaps.len() < 9 {
            let waits = (1..).find(|_| patience.allowance_ns() > 0);
            gaps.push(waits.expect("a trial comes"));
        }
        assert_eq!(gaps, [32, 64, 128, 256, 512, 1024, 2048, 4096, 4096]);
    }

    const TERMS: Terms = Terms { most: 100, grace: 0, entries: 0, lessons: [2, 8] };

    #[test]
    fn who_gets_into_debt_retreats_ever_longer_until_there_is_wealth_again() {
        let account = Account::new(TERMS);
        let retreat =
            || std::iter::repeat_with(|| account.retreats()).take_while(|retreats| *retreats).count();
        let after = |gains: &[i64]| {
            gains.iter().for_each(|gain| account.book(*gain));
            retreat()
        };
        assert_eq!([after(&[60, -60]), after(&[-1]), after(&[-1])], [0, 2, 4]);
        assert_eq!(
            [after(&[-1000]), after(&[-1])],
            [8, 8],
            "no debt is left, and there is a longest retreat"
        );
        assert_eq!([after(&[99, -100]), after(&[300, -100]), after(&[-1])], [8, 0, 2]);
    }

    fn is_in_debt(account: &Account) -> bool {
        account.balance.load(Ordering::Relaxed) < 0
    }

    #[test]
    fn a_debt_is_not_called_in_before_there_were_entries_to_pay_it_by() {
        let account = Account::new(Terms { entries: 3, ..TERMS });
        let retreats_after = |gain_ns| {
            account.book(gain_ns);
            account.retreats()
        };
        assert_eq!([-1000, 10].map(retreats_after), [false; 2]);
        assert!(retreats_after(10));
        account.retreat.store(0, Ordering::Relaxed);
        // Paid in between: counted anew.
        assert_eq!([-10, -10, 100, -100, -10].map(retreats_after), [false; 5]);
        assert!(retreats_after(0));
    }

    #[test]
    fn who_finds_what_it_waits_for_saves_up() {
        let [crowd, effort] = [(); 2].map(|()| Account::new(Terms { grace: u64::MAX, ..TERMS }));
        let balances = || [&crowd, &effort].map(|account| account.balance.load(Ordering::Relaxed));
        let find_at = |look: u32| {
            let (mut looks, mut after_others) = (0, false);
            let spin = spin_by(&crowd, &effort, Duration::from_micros(100), LONGEST, |others_ran| {
                looks += 1;
                after_others = others_ran;
                looks == look
            });
            assert_eq!(spin, Spin::Done);
            after_others
        };
        find_at(FIRST_LOOKS);
        assert_eq!(balances(), [0, TERMS.most]);
        effort.balance.store(0, Ordering::Relaxed);
        // Others that run first may take long, which is a loss.
        while find_at(FIRST_LOOKS + 1) {
            crowd.balance.store(0, Ordering::Relaxed);
        }
        assert_eq!(balances(), [TERMS.most; 2]);
    }

    #[test]
    fn a_debt_that_is_paid_in_time_has_no_consequence() {
        let account = Account::new(Terms { grace: u64::MAX, ..TERMS });
        account.book(-1000);
        account.book(-1000);
        assert!(is_in_debt(&account) && !account.retreats());
        account.book(100);
        assert!(!is_in_debt(&account), "nobody owes more than there can be saved up");
        assert_eq!(account.indebted_since.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn what_others_take_their_time_for_tells_nothing_of_the_peer() {
        let patience = Patience::new();
        let after = |spin: Spin| {
            patience.learn(spin);
            patience.recent.load(Ordering::Relaxed)
        };
        assert_eq!([after(Spin::Failed), after(Spin::Unknown), after(Spin::Done)], [0xfe; 3]);
    }

    /// How a spin that finds nothing ends, and after how many looks.
    fn vain_spin(crowd: &Account, effort: &Account) -> (Spin, u32) {
        let mut looks = 0;
        let budget = Duration::from_micros(100);
        let spin = spin_by(crowd, effort, budget, LONGEST, |_| {
            looks += 1;
            false
        });
        (spin, looks)
    }

    #[test]
    fn a_retreat_ends_spins_at_once_and_lasts_as_many_waits_as_it_should() {
        let patient = Account::new(Terms { grace: u64::MAX, ..TERMS });
        let effort = Account::new(TERMS);
        effort.book(-1);
        for _ in 0..2 {
            let (spin, looks) = vain_spin(&patient, &effort);
            assert_eq!(spin, Spin::Failed);
            assert!((FIRST_LOOKS + 1..=FIRST_LOOKS + FRUGAL_YIELDS).contains(&looks), "{looks}");
        }
        let (spin, looks) = vain_spin(&patient, &effort);
        assert!(matches!(spin, Spin::Vain(_)) && looks > FIRST_LOOKS, "{spin:?} {looks}");
        effort.book(-1000);
        for looks in [FIRST_LOOKS, FIRST_LOOKS + 1] {
            let mut left = looks;
            let find = |_| {
                left -= 1;
                left == 0
            };
            assert_eq!(spin_by(&patient, &effort, Duration::from_micros(100), LONGEST, find), Spin::Done);
            assert_eq!(effort.balance.load(Ordering::Relaxed), 0, "a retreat is no time to save");
        }
        let crowd = Account::new(TERMS);
        crowd.book(-1000);
        assert!(matches!(vain_spin(&crowd, &effort), (Spin::Declined(_), FIRST_LOOKS)));
    }
}
