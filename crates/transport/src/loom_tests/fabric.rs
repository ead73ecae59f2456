//! Sleeping over RDMA: what a side posts arrives at the other some time later, and bells travel beside it, on TCP.
//!
//! What runs is [`crate::waiting`]. The queue pair is modelled: WRITEs are put into the peer's memory by a thread of their
//! own, in the order in which they were posted. A sleeper's WRITE and READ need none: it waits for both, and the device
//! executes a READ after the WRITEs before it (InfiniBand Architecture Specification 1, 10.8.3.3).

use std::sync::Arc;

use loom::sync::atomic::fence;
use loom::thread;

use super::*;

/// What is written into the peer's memory.
enum Write {
    Message,
    Bells(u64),
}

/// How the two sides come to know of each other; all but [`Rule::Kept`] break it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rule {
    Kept,
    /// The sleeper does not read what has been posted.
    NoRead,
    /// It reads that, and does not wait for what it learns of.
    NoWait,
    /// The sender looks for sleepers before it notes what it has posted.
    LooksFirst,
    /// The event loop takes it that the sender still rings, though the kernel has reported a bell.
    NoDoubt,
}

impl Rule {
    /// What would be found anyway with a bell that comes before its reason, is not the matter.
    fn rings_early(self) -> bool {
        matches!(self, Self::Kept | Self::NoDoubt)
    }
}

/// The sending side, and what the other one reads and writes there.
struct Sender {
    control: Control,
    posted: AtomicU64,
    /// The receiver's `data_armed`, as it has last said.
    armed: AtomicU64,
    /// The receiver has said that it leaves.
    left: AtomicU32,
    /// This side has seen that after it had posted: it goes back, too, and sends again what has not been credited.
    went_back: AtomicU32,
    in_flight: Mutex<VecDeque<Write>>,
    work: Condvar,
    rule: Rule,
    link: Arc<Link>,
}

/// The receiving side's memory, as the sender's WRITEs reach it, and the TCP connection.
struct Link {
    memory: Mutex<Written>,
    arrival: Condvar,
    pipe: Pipe,
}

#[derive(Default)]
struct Written {
    messages: u64,
    bells: u64,
}

/// The receiving side.
struct Receiver {
    incoming: Control,
    outgoing: Control,
    lock: Mutex<()>,
    drained: AtomicU64,
    zero: AtomicU64,
    switched: AtomicU32,
    asked: Mutex<Asked>,
    sender: Arc<Sender>,
}

/// What an event loop knows of the sender since it has asked last, as `verbs::link` and `verbs::word::Vouched` do.
#[derive(Default)]
struct Asked {
    /// Messages that had been posted, and bells announced, if none of these was after the sender could see the sleepers.
    at: Option<(u64, u64)>,
    /// Arrivals on TCP that the kernel has reported.
    reported: u64,
    /// Some of them were after that.
    doubtful: bool,
}

fn over_rdma(rule: Rule) -> (Arc<Sender>, Arc<Receiver>) {
    let memory = Mutex::new(Written::default());
    let link = Arc::new(Link { memory, arrival: Condvar::new(), pipe: Pipe::new() });
    let sender = Arc::new(Sender {
        control: Control::new(),
        posted: AtomicU64::new(0),
        armed: AtomicU64::new(0),
        left: AtomicU32::new(0),
        went_back: AtomicU32::new(0),
        in_flight: Mutex::new(VecDeque::new()),
        work: Condvar::new(),
        rule,
        link,
    });
    let receiver = Arc::new(Receiver {
        incoming: Control::new(),
        outgoing: Control::new(),
        lock: Mutex::new(()),
        drained: AtomicU64::new(0),
        zero: AtomicU64::new(0),
        switched: AtomicU32::new(1),
        asked: Mutex::new(Asked::default()),
        sender: sender.clone(),
    });
    (sender, receiver)
}

impl Sender {
    fn post(&self, write: Write) {
        self.in_flight.lock().unwrap().push_back(write);
        self.work.notify_one();
    }

    /// As `verbs::link::Link::push`, of one message.
    fn send(&self) {
        let look = || (self.armed.load(Ordering::Acquire), self.left.load(Ordering::Relaxed));
        let first = look();
        self.post(Write::Message);
        self.posted.store(self.posted.load(Ordering::Relaxed) + 1, Ordering::Release);
        fence(Ordering::SeqCst);
        let (armed, left) = if self.rule == Rule::LooksFirst { first } else { look() };
        self.went_back.fetch_or(left, Ordering::Relaxed);
        if self.control.claim_data_bell_of(armed) {
            // As `waiting::ring`.
            let count = self.control.rung.0.count.fetch_add(1, Ordering::SeqCst) + 1;
            self.post(Write::Bells(count));
            if self.rule.rings_early() {
                self.put_bell();
            }
        }
    }

    fn put_bell(&self) {
        self.link.pipe.put(|unread| unread.bells += 1);
    }

    /// The device: executes what has been posted, `messages` in all.
    fn deliver(&self, messages: u64) {
        loop {
            let mut in_flight = self.in_flight.lock().unwrap();
            let write = loop {
                if let Some(write) = in_flight.pop_front() {
                    break write;
                }
                if self.link.memory.lock().unwrap().messages == messages {
                    return;
                }
                in_flight = self.work.wait(in_flight).unwrap();
            };
            drop(in_flight);
            let mut memory = self.link.memory.lock().unwrap();
            match write {
                Write::Message => memory.messages += 1,
                Write::Bells(count) => memory.bells = count,
            }
            drop(memory);
            self.link.arrival.notify_all();
            if matches!(write, Write::Bells(_)) && !self.rule.rings_early() {
                self.put_bell();
            }
        }
    }
}

impl Receiver {
    /// As `verbs::link::Link::scan`.
    fn scan(&self) {
        self.note(&self.sender.link.memory.lock().unwrap());
    }

    fn note(&self, written: &Written) {
        self.incoming.rung.0.count.fetch_max(written.bells, Ordering::AcqRel);
        self.incoming.head.0.position.fetch_max(written.messages, Ordering::AcqRel);
    }

    /// As its namesake in `verbs::link`, behind a WRITE and the READ of what has been posted, which it returns.
    fn await_posted(&self) -> u64 {
        fence(Ordering::SeqCst);
        if self.sender.rule == Rule::NoRead {
            return 0;
        }
        let posted = self.sender.posted.load(Ordering::Acquire);
        let link = &self.sender.link;
        let mut memory = link.memory.lock().unwrap();
        while self.sender.rule != Rule::NoWait && memory.messages < posted {
            memory = link.arrival.wait(memory).unwrap();
        }
        self.note(&memory);
        posted
    }

    /// As `verbs::link::Link::depart` and `freeze`: how many messages have come by then.
    fn leave(&self) -> u64 {
        self.sender.left.store(1, Ordering::Release);
        self.await_posted();
        self.scan();
        self.incoming.head()
    }

    /// A bell whose count is still under way keeps a sleeper awake until that has come.
    fn await_count(&self) {
        let link = &self.sender.link;
        let mut memory = link.memory.lock().unwrap();
        while memory.bells < self.drained.load(Ordering::Relaxed) + link.pipe.lock().bells {
            memory = link.arrival.wait(memory).unwrap();
        }
    }

    /// As a recv(2) of one message that does not wait. Whether there was one.
    fn take(&self) -> bool {
        let _guard = Side::lock(self).unwrap();
        self.scan();
        if self.incoming.is_empty() {
            return false;
        }
        self.incoming.release(self.incoming.tail() + 1);
        if self.incoming.is_empty() {
            waiting::drain(self);
        }
        true
    }

    /// As a blocking recv(2) of one message.
    fn recv(&self) {
        while !self.take() {
            waiting::sleep_for_data(self, |_| {
                self.sender.link.pipe.sleep_until_readable();
                self.await_count();
                Ok(())
            })
            .unwrap();
        }
    }

    /// As an event loop that waits for one message on an edge-triggered set, and wakes at least once for other connections.
    fn recv_in_a_loop(&self) {
        let mut others = true;
        while !self.take() {
            // A look at the kernel uses its report up.
            let arrivals = self.sender.link.pipe.lock().arrivals;
            self.observe(arrivals);
            let armed = &self.incoming.data_armed.0;
            armed.arm(Wakes::ByTcp);
            if !self.rings_anyway() {
                self.ask();
            }
            if !std::mem::take(&mut others) && !self.is_readable() {
                let reported = self.asked.lock().unwrap().reported;
                let mut unread = self.sender.link.pipe.lock();
                while unread.arrivals == reported {
                    unread = self.sender.link.pipe.arrival.wait(unread).unwrap();
                }
            }
            armed.disarm(Wakes::ByTcp);
        }
    }

    /// Writes who sleeps.
    fn announce(&self) {
        self.sender.armed.store(self.incoming.data_armed.0.word(), Ordering::Release);
    }

    /// As `ready::Connection::observe`, of so many arrivals.
    fn observe(&self, arrivals: u64) {
        let mut asked = self.asked.lock().unwrap();
        if std::mem::replace(&mut asked.reported, arrivals) != arrivals {
            asked.doubtful = self.sender.rule != Rule::NoDoubt;
            drop(asked);
            let _guard = Side::lock(self).unwrap();
            waiting::drain(self);
        }
    }

    /// As `verbs::link::Link::ask`, and its answer.
    fn ask(&self) {
        self.asked.lock().unwrap().doubtful = false;
        self.scan();
        let before = self.incoming.rung.0.count.load(Ordering::Acquire);
        self.announce();
        let posted = self.await_posted();
        let bells = self.incoming.rung.0.count.load(Ordering::Acquire);
        self.asked.lock().unwrap().at = (bells == before).then_some((posted, bells));
    }

    /// As its namesake in `verbs::link`.
    fn rings_anyway(&self) -> bool {
        self.scan();
        let now = (self.incoming.head(), self.incoming.rung.0.count.load(Ordering::Acquire));
        let asked = self.asked.lock().unwrap();
        asked.at == Some(now) && !asked.doubtful
    }
}

impl Side for Receiver {
    type Guard<'a> = MutexGuard<'a, ()>;

    fn incoming(&self) -> &Control {
        self.scan();
        &self.incoming
    }

    fn outgoing(&self) -> &Control {
        &self.outgoing
    }

    fn drained(&self) -> &AtomicU64 {
        &self.drained
    }

    fn recv_switched(&self) -> &AtomicU32 {
        &self.switched
    }

    fn tcp_received(&self) -> &AtomicU64 {
        &self.zero
    }

    fn lock(&self) -> Result<MutexGuard<'_, ()>, Errno> {
        Ok(self.lock.lock().unwrap())
    }

    fn is_readable(&self) -> bool {
        self.scan();
        !self.incoming.is_empty()
    }

    fn has_space(&self) -> bool {
        true
    }

    fn absorb(&self, _: bool) -> bool {
        true
    }

    fn take_bells(&self, most: u64) {
        let bells = self.sender.link.pipe.recv(most as usize, false).unwrap_or_default();
        waiting::add(&self.drained, bells.len() as u64);
    }

    fn thin_out_bells(&self, most: u64) {
        let there = self.sender.link.pipe.lock().bells;
        self.take_bells(most.min(there.saturating_sub(1)));
    }

    fn put_bell(&self) -> bool {
        true
    }

    fn pause(&self) {
        thread::yield_now();
    }

    /// As `verbs::link::Link::sync`.
    fn sync(&self) {
        self.announce();
        self.await_posted();
    }
}

/// `messages` are sent one by one; as many receivers as `sleepers` take one each, or one takes all.
fn explore_over_rdma(preemptions: usize, rule: Rule, messages: usize, sleepers: usize) {
    explore_receivers(preemptions, rule, messages, sleepers, Receiver::recv);
}

/// The same of receivers that take each message by `receive`.
fn explore_receivers(
    preemptions: usize,
    rule: Rule,
    messages: usize,
    sleepers: usize,
    receive: fn(&Receiver),
) {
    explore(preemptions, move || {
        let (sender, receiver) = over_rdma(rule);
        let readers: Vec<_> = (0..sleepers)
            .map(|_| {
                let receiver = receiver.clone();
                thread::spawn(move || (0..messages / sleepers).for_each(|_| receive(&receiver)))
            })
            .collect();
        let sends = {
            let sender = sender.clone();
            thread::spawn(move || (0..messages).for_each(|_| sender.send()))
        };
        // This thread is the device.
        sender.deliver(messages as u64);
        sends.join().unwrap();
        sender.deliver(messages as u64);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert_eq!(receiver.incoming.tail(), messages as u64);
    });
}

#[test]
fn over_rdma_a_sleeper_gets_every_message() {
    explore_over_rdma(3, Rule::Kept, 2, 1);
}

#[test]
fn over_rdma_of_two_sleepers_none_sleeps_on_while_there_is_a_message() {
    explore_over_rdma(1, Rule::Kept, 2, 2);
}

#[test]
#[should_panic(expected = "deadlock")]
fn over_rdma_a_sleeper_that_reads_nothing_sleeps_on() {
    explore_over_rdma(3, Rule::NoRead, 2, 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn over_rdma_a_sleeper_that_does_not_wait_for_what_is_under_way_sleeps_on() {
    explore_over_rdma(3, Rule::NoWait, 2, 1);
}

#[test]
#[should_panic(expected = "deadlock")]
fn over_rdma_a_sender_that_looks_first_leaves_a_sleeper_asleep() {
    explore_over_rdma(3, Rule::LooksFirst, 2, 1);
}

/// Two messages come to an event loop, which need not ask before each sleep.
fn explore_a_loop(rule: Rule) {
    explore_receivers(2, rule, 2, 1, Receiver::recv_in_a_loop);
}

#[test]
fn over_rdma_an_event_loop_gets_every_message() {
    explore_a_loop(Rule::Kept);
}

#[test]
#[should_panic(expected = "deadlock")]
fn over_rdma_an_event_loop_that_takes_a_report_for_old_sleeps_on() {
    explore_a_loop(Rule::NoDoubt);
}

/// A message is sent while the receiver leaves: it has come by then, or its sender sends it again.
fn explore_leaving(rule: Rule) {
    explore(3, move || {
        let (sender, receiver) = over_rdma(rule);
        let leaver = thread::spawn(move || receiver.leave());
        let sends = {
            let sender = sender.clone();
            thread::spawn(move || sender.send())
        };
        sender.deliver(1);
        sends.join().unwrap();
        let come = leaver.join().unwrap();
        assert!(come == 1 || sender.went_back.load(Ordering::Relaxed) == 1, "lost");
    });
}

#[test]
fn over_rdma_nothing_is_lost_on_a_leaver() {
    explore_leaving(Rule::Kept);
}

#[test]
#[should_panic(expected = "lost")]
fn over_rdma_a_leaver_that_reads_nothing_loses_a_message() {
    explore_leaving(Rule::NoRead);
}

#[test]
#[should_panic(expected = "lost")]
fn over_rdma_a_leaver_that_does_not_wait_loses_a_message() {
    explore_leaving(Rule::NoWait);
}

#[test]
#[should_panic(expected = "lost")]
fn over_rdma_a_sender_that_looks_first_loses_a_message_to_a_leaver() {
    explore_leaving(Rule::LooksFirst);
}
