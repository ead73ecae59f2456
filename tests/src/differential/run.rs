//! Runs a program, on the kernel or under the library, and notes what can be seen of it.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;

use super::model::{Actor, Connection, Kind, Model, Who};
use super::processes::{Process, Processes, Silence};
use super::program::{Control, End, Flag, How, Op, Program, ReceiveBy, SendBy, SocketOption, Step};
use super::rules::{LEAVES_ROOM, SURELY_HELD, SURELY_ROOM, admit, data_of, show};
use super::wire::{Arrival, Call, Command, Reply};
use crate::calls::Family;
use crate::harness::Stats;

/// How long nothing may come of what was sent, and how long a wait for it may take to end.
const DRAINED: Duration = Duration::from_secs(5);

/// Rounds of warm-up after which both ends have left TCP.
const WARM: u32 = 12;

/// Bytes of a request or response of the warm-up.
const WARM_UP_BYTES: usize = 8;

/// What was seen of a program.
#[derive(Clone, Debug)]
pub struct Seen {
    /// A line for each step and what it led to. Equal, if the library is right.
    pub transcript: Vec<String>,
    /// What the library counted at each end.
    pub stats: [Stats; 2],
    /// A process hangs or is gone, or something did not arrive in time. On the kernel that should not be.
    pub is_out_of_step: bool,
    /// What else may help: standard error, and what hanging processes did.
    pub remarks: String,
}

/// Runs `program` in processes of `endpoint`, with files in `folder`, which is emptied.
///
/// # Errors
/// If processes cannot be started, or the program's connections cannot be made.
pub fn run(program: &Program, endpoint: &Path, folder: &Path, library: bool) -> Result<Seen> {
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    let start = |name: &str| Processes::start(endpoint, &folder.join(name), library, &program.setting);
    let (server, client) = (start("server")?, start("client")?);
    let mut run = Run {
        processes: [server.0, client.0],
        links: [vec![server.1], vec![client.1]],
        model: Model {
            is_unix: program.setting.family == Family::Unix,
            actors: [vec![Actor::default()], vec![Actor::default()]],
            ..Model::default()
        },
        transcript: Vec::new(),
        before: Vec::new(),
        is_out_of_step: false,
    };
    let result = run.connect(program).and_then(|()| run.warm_up(program)).and_then(|()| {
        run.before.clone_from(&run.model.connections);
        for (number, step) in program.steps.iter().enumerate() {
            run.step(number, step)?;
        }
        run.finish()
    });
    let mut remarks = String::new();
    if let Err((who, silence)) = result {
        let (name, diagnosis) = match silence {
            Silence::Ended => ("is gone", String::new()),
            Silence::Hangs => ("HANGS", run.processes.iter().map(Processes::diagnosis).collect()),
        };
        run.transcript.push(format!("{:?} {}: {name}", who.0, who.1));
        run.is_out_of_step = true;
        remarks.push_str(&diagnosis);
    }
    for processes in &run.processes {
        remarks.push_str(&processes.stderr());
    }
    let [server, client] = &run.processes;
    let stats = [server.stats()?, client.stats()?];
    Ok(Seen { transcript: run.transcript, stats, is_out_of_step: run.is_out_of_step, remarks })
}

struct Run {
    processes: [Processes; 2],
    links: [Vec<Process>; 2],
    model: Model,
    transcript: Vec<String>,
    /// The connections before the step.
    before: Vec<Connection>,
    is_out_of_step: bool,
}

type Asked<T> = Result<T, (Who, Silence)>;

impl Run {
    fn ask(&self, who: Who, command: &Command) -> Asked<Reply> {
        self.links[who.0 as usize][who.1].ask(command).map_err(|silence| (who, silence))
    }

    fn call(&self, who: Who, op: Op) -> Call {
        let (mut stream, mut fds, mut data) = Default::default();
        match &op {
            Op::Send { fd, .. } | Op::SendFile { fd, .. } | Op::Splice { fd, .. } => {
                if let Some(connection) = self.model.connection_of(who, *fd) {
                    let sent = self.model.connections[connection].flows[who.0 as usize].sent;
                    stream = self.model.stream(connection, who.0, sent);
                }
            }
            Op::Poll { .. } => {
                let all = self.model.actor(who).fds.iter();
                fds = all.filter(|&(_, &kind)| kind != Kind::Listener).map(|(&fd, _)| fd).collect();
            }
            Op::Control { fd, events, .. } => {
                let connection = self.model.connection_of(who, *fd);
                data = connection.map_or(0, |connection| data_of(connection, *fd, *events));
            }
            _ => {}
        }
        Call { op, stream, guarded: false, fds, data }
    }

    fn make(&self, who: Who, op: Op) -> Asked<Reply> {
        self.ask(who, &Command::Do(self.call(who, op)))
    }

    fn connect(&mut self, program: &Program) -> Asked<()> {
        let (server, client) = ((End::Server, 0), (End::Client, 0));
        let family = program.setting.family;
        let port = self.ask(server, &Command::Listen(family))?.value;
        for index in 0..program.setting.warm_up.len() {
            let connected = self.ask(client, &Command::Connect(family, port as u16))?;
            let accepted = self.ask(server, &Command::Accept)?;
            let warm = program.setting.warm_up[index] >= WARM && program.setting.upgrade_after == 1;
            self.model.connections.push(Connection { warm, ..Connection::default() });
            for (who, reply) in [(client, connected), (server, accepted)] {
                assert_eq!(reply.error, 0, "a connection to the same host can be made");
                let fd = reply.value as i32;
                self.model.actor_mut(who).fds.insert(fd, Kind::Connection(index));
                if program.setting.without_delay {
                    self.make(who, Op::SetOption { fd, option: SocketOption::NoDelay, value: 1 })?;
                }
            }
        }
        Ok(())
    }

    fn warm_up(&mut self, program: &Program) -> Asked<()> {
        for (index, &rounds) in program.setting.warm_up.iter().enumerate() {
            let holders = End::BOTH.map(|end| self.model.holder(end, index).expect("it is connected"));
            let [(server, at_server), (client, at_client)] = holders;
            for _ in 0..rounds {
                for (who, fd, other, at_other) in
                    [(client, at_client, server, at_server), (server, at_server, client, at_client)]
                {
                    let send = Op::Send { fd, len: WARM_UP_BYTES, by: SendBy::Send, flags: Vec::new() };
                    let sent = self.make(who, send)?;
                    let receive = Op::Receive {
                        fd: at_other,
                        len: WARM_UP_BYTES,
                        by: ReceiveBy::Recv,
                        flags: vec![Flag::WaitAll],
                    };
                    let received = self.make(other, receive.clone())?;
                    let shown = show(&self.model, other, &receive, &received);
                    if (sent.value, shown.as_str()) != (8, "8") {
                        self.transcript.push(format!("warm-up: {} sent, {shown} received", sent.value));
                    }
                    let flow = &mut self.model.connections[index].flows[who.0 as usize];
                    flow.sent += WARM_UP_BYTES as u64;
                    flow.received += WARM_UP_BYTES as u64;
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, number: usize, step: &Step) -> Asked<()> {
        let living = self.model.living(step.end);
        if living.is_empty() {
            return Ok(());
        }
        let who = living[step.process % living.len()];
        let Some(op) = self.model.resolve(who, &step.op) else { return Ok(()) };
        let (mut op, in_thread) = match op {
            Op::Start { op } => (*op, true),
            op => (op, false),
        };
        let title = |op: &Op, verb: &str| format!("{number} {:?} {}: {verb}{op:?}", who.0, who.1);
        let manner = match admit(&self.model, who, &mut op, in_thread) {
            Ok(manner) => manner,
            Err(reason) => {
                self.transcript.push(format!("{}: left out: {reason}", title(&op, "")));
                return Ok(());
            }
        };
        if manner.overfills
            && let Op::Send { fd, .. } | Op::SendFile { fd, .. } | Op::Splice { fd, .. } = op
        {
            self.loosen(who, fd);
        }
        let line = match &op {
            Op::Fork => self.fork(who)?,
            Op::Exit | Op::Kill => self.end(who, op == Op::Kill)?,
            Op::Drain { fd } => {
                let connection = self.model.connection_of(who, *fd).expect("rules ask for a connection");
                self.drain(who, *fd, connection)?
            }
            _ if manner.in_thread => {
                let reply = self.ask(who, &Command::Start(self.call(who, op.clone())))?;
                let writes = matches!(op, Op::Send { .. });
                if let Some(done) = &reply.done
                    && !writes
                {
                    self.note_outcome(who, &op, done)
                } else {
                    self.model.actor_mut(who).started = Some(op.clone());
                    self.smear_those_that_fill_buffers();
                    if let Some(done) = &reply.done {
                        self.note_outcome(who, &op, done);
                    }
                    self.model.actor_mut(who).has_written = writes && reply.done.is_some();
                    if writes { "waits or not" } else { "waits" }.to_owned()
                }
            }
            _ => {
                let call = Call { guarded: manner.guarded, ..self.call(who, op.clone()) };
                let reply = self.ask(who, &Command::Do(call))?;
                self.note_outcome(who, &op, &reply)
            }
        };
        self.transcript
            .push(format!("{} = {line}", title(&op, if manner.in_thread { "thread: " } else { "" })));
        self.settle(&op)
    }

    fn loosen(&mut self, who: Who, fd: i32) {
        if let Some(connection) = self.model.connection_of(who, fd) {
            let connection = &mut self.model.connections[connection];
            let is_refused = self.model.is_unix && connection.flows[who.0 as usize].ended;
            // Nobody reads what is sent to an end that is closed.
            if !connection.closed[who.0.other() as usize] && !is_refused {
                connection.flows[who.0 as usize].loose = true;
                connection.smeared = true;
                // Who reads no more may see an end before the bytes.
                connection.wild |= connection.shut[who.0.other() as usize][0];
            }
        }
    }

    fn smear_those_that_fill_buffers(&mut self) {
        for index in 0..self.model.connections.len() {
            if End::BOTH.iter().any(|&end| self.model.fills_a_buffer(end, index)) {
                self.model.connections[index].smeared = true;
            }
        }
    }

    /// What is compared of an answer; and what it changes is noted.
    fn note_outcome(&mut self, who: Who, op: &Op, reply: &Reply) -> String {
        let line = show(&self.model, who, op, reply);
        if let Op::Splice { fd, .. } | Op::Shutdown { fd, how: How::Reading } = op
            && let Some(index) = self.model.connection_of(who, *fd)
        {
            self.model.connections[index].came_back = true;
        }
        // Of one that depends on timing both are taken to have done the same.
        let is_loose = matches!(op, Op::Shutdown { fd, .. }
            if self.model.connection_of(who, *fd).is_some_and(|index| self.model.connections[index].wild));
        if reply.error != 0 && !is_loose || reply.waits {
            return line;
        }
        let end = who.0 as usize;
        let connection_of = |model: &Model, fd| model.connection_of(who, fd);
        match op {
            Op::Send { fd, .. } | Op::SendFile { fd, .. } | Op::Splice { fd, .. } => {
                if let Some(connection) = connection_of(&self.model, *fd) {
                    let is_unix = self.model.is_unix;
                    let answered_by_reset =
                        !is_unix && self.model.is_deaf(who.0.other(), connection) && reply.value > 0;
                    let connection = &mut self.model.connections[connection];
                    let flow = &mut connection.flows[end];
                    flow.charge = flow.charge_with(reply.value as u64);
                    flow.sent += reply.value as u64;
                    connection.smeared |= flow.unread() > LEAVES_ROOM || is_unix && flow.charge > SURELY_ROOM;
                    connection.reset |= answered_by_reset;
                }
            }
            Op::Receive { fd, flags, .. } if !flags.contains(&Flag::Peek) => {
                if let Some(connection) = connection_of(&self.model, *fd) {
                    let incoming = who.0.other() as usize;
                    self.model.connections[connection].flows[incoming].received += reply.value as u64;
                }
            }
            Op::Shutdown { fd, how } => {
                if let Some(connection) = connection_of(&self.model, *fd) {
                    let is_unix = self.model.is_unix;
                    let connection = &mut self.model.connections[connection];
                    connection.shut[end][0] |= *how != How::Writing;
                    connection.shut[end][1] |= *how != How::Reading;
                    connection.flows[end].ended |= *how != How::Reading;
                    connection.flows[1 - end].ended |= is_unix && *how != How::Writing;
                    // What is under way is answered by a reset, or has arrived; behind much of its own the end may come late.
                    let loose = connection.flows[1 - end].loose
                        || connection.shut[end][1] && connection.flows[end].loose;
                    connection.wild |= connection.shut[end][0] && loose;
                }
            }
            Op::SetOption { fd, option, value } => {
                if let Some(connection) = connection_of(&self.model, *fd) {
                    let is_unix = self.model.is_unix;
                    let connection = &mut self.model.connections[connection];
                    match option {
                        SocketOption::ReceiveTimeout => connection.times_out[end] = *value > 0,
                        SocketOption::Linger => connection.resets_at_close[end] = !is_unix,
                        _ => {}
                    }
                }
            }
            Op::Nonblocking { fd, on } => {
                if let Some(connection) = connection_of(&self.model, *fd) {
                    self.model.connections[connection].nonblocking[end] = *on;
                }
            }
            Op::Poll { .. } => {
                let all = self.model.actor(who).fds.values();
                let sets: Vec<u32> = all
                    .filter_map(|kind| if let Kind::Set(set) = kind { Some(*set) } else { None })
                    .collect();
                self.model.polled.extend(sets);
            }
            Op::NewSet => {
                self.model.sets += 1;
                let set = Kind::Set(self.model.sets);
                self.model.actor_mut(who).fds.insert(reply.value as i32, set);
            }
            Op::Control { set, fd, how: Control::Delete, .. } => {
                if let Some(&Kind::Set(number)) = self.model.actor(who).fds.get(set) {
                    self.model.registered.retain(|&(of, as_fd, _)| (of, as_fd) != (number, *fd));
                }
            }
            Op::Control { set, fd, how: Control::Add | Control::Modify, events } => {
                const ANY: i32 = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP;
                if let Some(&Kind::Set(number)) = self.model.actor(who).fds.get(set) {
                    if events & libc::EPOLLET as u32 != 0 && events & libc::EPOLLOUT as u32 != 0 {
                        self.model.tell_of_room.insert(number);
                    }
                    if events & ANY as u32 == 0 {
                        self.model.ask_for_nothing.insert(number);
                    }
                    if let Some(index) = connection_of(&self.model, *fd) {
                        self.model.registered.insert((number, *fd, index));
                    }
                }
            }
            Op::Close { fd } => {
                let actor = self.model.actor_mut(who);
                actor.fds.remove(fd);
                actor.closed = Some(*fd);
            }
            Op::Dup { fd } => self.copy(who, *fd, reply.value as i32),
            Op::Dup2 { fd, onto } => self.copy(who, *fd, *onto),
            _ => {}
        }
        line
    }

    fn copy(&mut self, who: Who, fd: i32, onto: i32) {
        let fds = &mut self.model.actor_mut(who).fds;
        match fds.get(&fd).copied() {
            Some(kind) => fds.insert(onto, kind),
            None => fds.remove(&onto),
        };
    }

    fn fork(&mut self, who: Who) -> Asked<String> {
        let reply = self.make(who, Op::Fork)?;
        let end = who.0 as usize;
        match self.processes[end].next_fork(reply.value) {
            Ok(process) => self.links[end].push(process),
            Err(_) => return Err((who, Silence::Hangs)),
        }
        let child = Actor { started: None, ..self.model.actor(who).clone() };
        self.model.actors[end].push(child);
        Ok(format!("process {}", self.model.actors[end].len() - 1))
    }

    fn end(&mut self, who: Who, kill: bool) -> Asked<String> {
        // What its thread has read or written so far nobody learns.
        if let Some(Op::Send { fd, .. } | Op::Receive { fd, .. }) = self.model.actor(who).started.clone()
            && let Some(index) = self.model.connection_of(who, fd)
            && (self.model.is_sending(who.0, index) || self.model.fills_a_buffer(who.0, index))
        {
            self.model.connections[index].wild = true;
        }
        let ended = self.links[who.0 as usize][who.1].end(kill).map_err(|_| (who, Silence::Ended))?;
        let actor = self.model.actor_mut(who);
        actor.gone = true;
        actor.killed = kill;
        actor.started = None;
        if ended { Ok("ended".to_owned()) } else { Err((who, Silence::Hangs)) }
    }

    /// Reads until nothing is under way to `who`.
    fn drain(&mut self, who: Who, fd: i32, index: usize) -> Asked<String> {
        let (end, sender) = (who.0, who.0.other());
        let mut came = Instant::now();
        loop {
            let connection = &self.model.connections[index];
            let flow = connection.flows[sender as usize];
            let sending = self.is_writing(sender, index);
            if !sending && flow.unread() == 0 || came.elapsed() > DRAINED {
                break;
            }
            let op = Op::Receive { fd, len: 256 << 10, by: ReceiveBy::Recv, flags: vec![Flag::DontWait] };
            let reply = self.make(who, op.clone())?;
            let line = show(&self.model, who, &op, &reply);
            if line.contains("WRONG") {
                return Ok(line);
            }
            if reply.error == libc::EAGAIN {
                self.check(sender, false)?;
                let flow = self.model.connections[index].flows[sender as usize];
                if flow.unread() > 0 || self.is_writing(sender, index) {
                    let wanted = Arrival { unread: 1, ..Arrival::default() };
                    // If nothing comes, the next turn finds out.
                    self.ask(who, &Command::Settle { fd, wanted })?;
                }
            } else if reply.error != 0 || reply.value == 0 {
                self.check(sender, false)?;
                break;
            } else {
                self.model.connections[index].flows[sender as usize].received += reply.value as u64;
                came = Instant::now();
            }
        }
        let sending = self.is_writing(sender, index);
        let was_sending = self.model.is_sending(sender, index);
        let connection = &mut self.model.connections[index];
        let flow = &mut connection.flows[sender as usize];
        let lost = flow.unread();
        let was_loose = std::mem::take(&mut flow.loose);
        if connection.wild || connection.reset && was_loose {
            // Nor is it known whether a thread still writes.
            connection.wild = true;
            return Ok("all that was to come".to_owned());
        }
        if !sending
            && was_sending
            && let Some(writer) = self.model.started(sender).map(|(writer, _)| writer)
        {
            self.model.actor_mut(writer).started = None;
        }
        let connection = &mut self.model.connections[index];
        let flow = connection.flows[sender as usize];
        if lost > 0 || sending {
            // The next steps would be nonsense.
            connection.wild = true;
            return Ok(format!("{lost} bytes are MISSING, {} came", flow.received));
        }
        // From now on the sender has room again.
        if was_loose && let Some((holder, fd)) = self.model.holder(sender, index) {
            let wanted = Arrival { room: true, ..Arrival::default() };
            if self.ask(holder, &Command::Settle { fd, wanted })?.value == 0 {
                return Ok(format!("all; {end:?} has read, but there is no room to write"));
            }
        }
        Ok("all".to_owned())
    }

    /// Whether a thread of `end` is in a large write to this connection now.
    fn is_writing(&self, end: End, index: usize) -> bool {
        let started = self.model.started(end);
        self.model.is_sending(end, index)
            && started.is_some_and(|(who, _)| !self.model.actor(who).has_written)
    }

    /// Waits until what the step did has arrived, and collects calls that it ended.
    fn settle(&mut self, op: &Op) -> Asked<()> {
        let mut something_ended = false;
        for index in 0..self.model.connections.len() {
            something_ended |= self.note_closed(index);
        }
        for index in 0..self.model.connections.len() {
            for end in End::BOTH {
                // docs/limitations.md: who was killed never lets go of its connections.
                let killed = self.model.actors[end.other() as usize].iter().any(|actor| actor.killed);
                self.settle_one(index, end, killed || matches!(op, Op::Exit | Op::Kill))?;
            }
        }
        self.before.clone_from(&self.model.connections);
        let vague = something_ended || matches!(op, Op::Exit | Op::Kill);
        for end in End::BOTH {
            self.check(end, vague)?;
        }
        self.before.clone_from(&self.model.connections);
        Ok(())
    }

    /// Notes which ends of a connection the step has closed; whether it has ended any direction.
    fn note_closed(&mut self, index: usize) -> bool {
        let is_unix = self.model.is_unix;
        for end in End::BOTH {
            let closed = self.model.holder(end, index).is_none();
            let fills = !is_unix && self.model.fills_a_buffer(end.other(), index);
            let connection = &mut self.model.connections[index];
            if closed && !connection.closed[end as usize] {
                let incoming = connection.flows[end.other() as usize];
                connection.closed[end as usize] = true;
                connection.flows[end as usize].ended = true;
                connection.flows[end.other() as usize].ended |= is_unix;
                connection.reset |= incoming.unread() > 0 || connection.resets_at_close[end as usize];
                // What Nagle's algorithm holds back is lost by a reset, and nobody can ask as long as a thread has the rest.
                let is_held_back = fills && connection.flows[end as usize].unread() > 0;
                // docs/limitations.md: what was put aside to go back to the kernel's socket makes no reset.
                connection.wild |= is_unix && connection.came_back && incoming.unread() > 0;
                // Whether all has been read depends on timing.
                connection.wild |= incoming.loose
                    || connection.reset && (connection.flows[end as usize].loose || is_held_back);
            }
        }
        let ended = |connection: &Connection| connection.flows.map(|flow| flow.ended);
        let changed = ended(&self.model.connections[index]) != ended(&self.before[index]);
        let waits = End::BOTH.iter().any(|&end| self.model.started(end).is_some());
        if changed && waits {
            // Who waits may wake before all events are there, and sees the others as further edges.
            self.model.connections[index].smeared = true;
        }
        changed
    }

    /// Waits until what the other end did is to be seen at `end`.
    fn settle_one(&mut self, index: usize, end: End, sudden: bool) -> Asked<()> {
        let Some((who, fd)) = self.model.holder(end, index) else { return Ok(()) };
        let (now, before) = (&self.model.connections[index], &self.before[index]);
        let incoming = end.other() as usize;
        let (flow, was) = (&now.flows[incoming], &before.flows[incoming]);
        let mut wanted = Arrival::default();
        if sudden && flow.loose && flow.ended && !was.ended {
            // The end comes behind the bytes.
            self.model.connections[index].wild = true;
            return Ok(());
        }
        if now.wild {
            return Ok(());
        }
        // What does not fit comes when the reader has made room, and over TCP some time later.
        if flow.sent != was.sent && !flow.loose {
            wanted.unread = flow.unread();
        }
        if self.model.fills_a_buffer(end, index) || self.model.is_deaf(end, index) {
            wanted.unread = 0;
        }
        if self.model.is_receiving(end, index) {
            // It takes what comes.
            wanted.unread = 0;
        }
        if !flow.loose {
            wanted.end = flow.ended && !was.ended;
            wanted.hangup = !now.flows[end as usize].loose && now.reset && !before.reset;
            let both_ended = |connection: &Connection| connection.flows.iter().all(|flow| flow.ended);
            wanted.hangup |= self.model.is_unix && both_ended(now) && !both_ended(before);
        }
        wanted.sudden = sudden && (wanted.end || wanted.hangup);
        // docs/limitations.md: a reset by who has read all can't be told from the end.
        let unseen = now.resets_at_close[incoming] && !before.reset;
        // Nor what becomes of one that has shut down both directions.
        if wanted.sudden && (now.shut[end as usize][0] || now.shut[incoming] == [true; 2] || unseen) {
            // docs/limitations.md: who reads no more learns of it by writing, and only after some writes.
            self.model.connections[index].wild = true;
            return Ok(());
        }
        if wanted != Arrival::default() && self.ask(who, &Command::Settle { fd, wanted })?.value == 0 {
            self.is_out_of_step = true;
            self.transcript.push(format!("connection {index} does not bring {end:?} {wanted:?}"));
        }
        Ok(())
    }

    /// Collects what threads of an end have done; `vague`: with events that may not be all.
    fn check(&mut self, end: End, vague: bool) -> Asked<()> {
        let Some((who, op)) = self.model.started(end) else { return Ok(()) };
        let op = op.clone();
        let writes = matches!(op, Op::Send { .. });
        if writes && self.model.actor(who).has_written {
            return Ok(());
        }
        let start = Instant::now();
        let mut reply = self.ask(who, &Command::Check)?;
        // What wakes a read may come late, by Nagle's algorithm.
        while reply.done.is_none() && self.can_read(who, &op) && start.elapsed() < DRAINED {
            reply = self.ask(who, &Command::Check)?;
        }
        if let Some(done) = reply.done {
            let line = self.note_outcome(who, &op, &done);
            if writes {
                self.model.actor_mut(who).has_written = true;
                return Ok(());
            }
            self.model.actor_mut(who).started = None;
            let vague = vague && matches!(op, Op::Poll { .. } | Op::Wait { .. }) && done.error == 0;
            let line = if vague { "wakes".to_owned() } else { line };
            self.transcript.push(format!("  {end:?} {}: thread: {op:?} = {line}", who.1));
        }
        Ok(())
    }

    /// Whether all that a read waits for has been sent.
    fn can_read(&self, who: Who, op: &Op) -> bool {
        let Op::Receive { fd, len, flags, .. } = op else { return false };
        let Some(index) = self.model.connection_of(who, *fd) else { return false };
        let connection = &self.model.connections[index];
        let unread = connection.flows[who.0.other() as usize].unread();
        let wanted = if flags.contains(&Flag::WaitAll) { *len as u64 } else { 1 };
        !connection.wild && !self.model.is_deaf(who.0, index) && unread >= wanted
    }

    /// Reads what is left, and ends all processes.
    fn finish(&mut self) -> Asked<()> {
        for index in 0..self.model.connections.len() {
            for end in End::BOTH {
                let Some((who, fd)) = self.model.holder(end, index) else { continue };
                if self.model.is_receiving(end, index) {
                    continue;
                }
                let flow = self.model.connections[index].flows[end.other() as usize];
                let line = if flow.loose {
                    self.drain(who, fd, index)?
                } else {
                    let len = SURELY_HELD as usize;
                    let op = Op::Receive { fd, len, by: ReceiveBy::Recv, flags: vec![Flag::DontWait] };
                    let reply = self.make(who, op.clone())?;
                    self.note_outcome(who, &op, &reply)
                };
                self.transcript.push(format!("at the end {end:?} reads from connection {index}: {line}"));
            }
        }
        for end in End::BOTH {
            for who in self.model.living(end) {
                self.end(who, false)?;
            }
        }
        Ok(())
    }
}
