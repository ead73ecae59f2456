//! What an `AF_UNIX` stream has beside its bytes: names of senders, descriptors, credentials.

use std::os::raw::{c_int, c_void};

use super::show::{Bytes, lengths, message_flags};
use super::stream::{message_of, show_pieces, vector_of, vector_of_mut};
use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

/// Bytes of a control message's header: length, level and type (`struct cmsghdr`).
const HEADER: usize = size_of::<libc::cmsghdr>();

/// Room for any name, and some more.
const NAME_ROOM: usize = size_of::<libc::sockaddr_storage>();

/// Room for control data, of which a call may be offered less.
const CONTROL_ROOM: usize = 256;

/// What goes beside the bytes of one sendmsg(2).
#[derive(Clone, Copy, Debug, Default)]
pub struct Beside<'a> {
    /// Descriptors (`SCM_RIGHTS`), none if there are none.
    pub fds: &'a [Fd],
    /// Whether to say who sends (`SCM_CREDENTIALS`), as it is.
    pub credentials: bool,
    /// Whether to say where to: an abstract name that nobody has.
    pub address: bool,
}

/// sendmsg(2) with something beside the bytes.
pub fn sendmsg_with(fd: Fd, pieces: &[&[u8]], beside: Beside<'_>, flags: c_int) -> Outcome<usize> {
    let mut vector = vector_of(pieces);
    let mut message = message_of(&mut vector);
    let name = nobodys_name();
    if beside.address {
        message.msg_name = name.as_ptr().cast_mut().cast();
        message.msg_namelen = name.len() as libc::socklen_t;
    }
    let mut control = Vec::new();
    if !beside.fds.is_empty() {
        let data: Vec<u8> = beside.fds.iter().flat_map(|fd| fd.to_ne_bytes()).collect();
        append(&mut control, libc::SCM_RIGHTS, &data);
    }
    if beside.credentials {
        let numbers = [std::process::id(), user(), group()];
        append(&mut control, libc::SCM_CREDENTIALS, &numbers.map(u32::to_ne_bytes).concat());
    }
    if !control.is_empty() {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&*control);
    }
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::sendmsg(fd, &raw const message, flags) };
    noted_number(Errno::check(ret), || {
        let Beside { fds, credentials, address } = beside;
        let count = fds.len();
        let kinds = [(count > 0, "rights"), (credentials, "credentials"), (address, "address")];
        let kinds: Vec<_> = kinds.iter().filter_map(|&(is, kind)| is.then_some(kind)).collect();
        let (shown, flags) = (show_pieces(pieces), message_flags(flags));
        format!("sendmsg({fd}, {shown}, {kinds:?} {count} descriptors, {flags})")
    })
}

/// sendto(2) with an abstract name that nobody has.
pub fn sendto_nobody(fd: Fd, data: &[u8], flags: c_int) -> Outcome<usize> {
    let name = nobodys_name();
    let (address, length) = (name.as_ptr().cast(), name.len() as libc::socklen_t);
    // SAFETY: pointers and lengths are those of `data` and `name`.
    let ret = unsafe { libc::sendto(fd, data.as_ptr().cast(), data.len(), flags, address, length) };
    noted_number(Errno::check(ret), || {
        format!("sendto({fd}, {}, {}, a name)", Bytes(data), message_flags(flags))
    })
}

fn nobodys_name() -> Vec<u8> {
    let family = libc::AF_UNIX as libc::sa_family_t;
    [&family.to_ne_bytes()[..], b"\0thallus-test-nobody"].concat()
}

fn user() -> u32 {
    // SAFETY: takes no pointer.
    unsafe { libc::getuid() }
}

fn group() -> u32 {
    // SAFETY: takes no pointer.
    unsafe { libc::getgid() }
}

/// Appends a control message to `control`, padded to eight bytes.
fn append(control: &mut Vec<u64>, kind: c_int, data: &[u8]) {
    let mut bytes = (HEADER + data.len()).to_ne_bytes().to_vec();
    bytes.extend(libc::SOL_SOCKET.to_ne_bytes());
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(data);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    control.extend(bytes.chunks(8).map(|word| u64::from_ne_bytes(word.try_into().expect("eight bytes"))));
}

/// Who sent something, as `SCM_CREDENTIALS` and `SO_PEERCRED` tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The process, 0 if that is not known.
    pub process: u32,
    /// The user.
    pub user: u32,
    /// The group.
    pub group: u32,
}

impl Credentials {
    fn of(bytes: &[u8]) -> Self {
        let word = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        Self { process: word(0), user: word(4), group: word(8) }
    }

    /// Numbers of processes differ between runs.
    fn show(self) -> String {
        let process = match self.process {
            0 => "nobody",
            own if own == std::process::id() => "own",
            _ => "another",
        };
        format!("{process} user {} group {}", self.user, self.group)
    }
}

/// What a recvmsg(2) gave.
#[derive(Clone, Debug, Default)]
pub struct Letter {
    /// The bytes of all buffers.
    pub data: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<Fd>,
    /// Who sent it, if that came along.
    pub credentials: Option<Credentials>,
}

/// recvmsg(2) into buffers of the given lengths, with so many bytes of room for the sender's name and for control data; with
/// none, the call is given no buffer.
pub fn recvmsg_with(fd: Fd, lens: &[usize], [name, control]: [usize; 2], flags: c_int) -> Outcome<Letter> {
    let mut pieces: Vec<Vec<u8>> = lens.iter().map(|&len| vec![0; len]).collect();
    let mut vector = vector_of_mut(&mut pieces);
    let mut message = message_of(&mut vector);
    let (mut name_bytes, mut control_words) = ([0xee_u8; NAME_ROOM], [0u64; CONTROL_ROOM / 8]);
    if name > 0 {
        message.msg_name = name_bytes.as_mut_ptr().cast();
        message.msg_namelen = name.min(NAME_ROOM) as libc::socklen_t;
    }
    if control > 0 {
        message.msg_control = control_words.as_mut_ptr().cast();
        message.msg_controllen = control.min(CONTROL_ROOM);
    }
    // SAFETY: the message describes buffers that outlive the call.
    let ret = unsafe { libc::recvmsg(fd, &raw mut message, flags) };
    let control_bytes: Vec<u8> = control_words.iter().flat_map(|word| word.to_ne_bytes()).collect();
    let received = Errno::check(ret).map(|len| {
        let mut letter = Letter { data: pieces.concat(), ..Letter::default() };
        letter.data.truncate(len);
        open_letter(&mut letter, &control_bytes[..message.msg_controllen]);
        letter
    });
    noted(
        received,
        || format!("recvmsg({fd}, {}, {name}, {control}, {})", lengths(lens), message_flags(flags)),
        |letter| {
            let credentials = letter.credentials.map_or("none".to_owned(), Credentials::show);
            format!(
                "{} {} flags {} address {} control length {} descriptors {:?} credentials {credentials}",
                letter.data.len(),
                Bytes(&letter.data),
                message_flags(message.msg_flags),
                show_name(&name_bytes[..name.min(NAME_ROOM)], message.msg_namelen as usize),
                message.msg_controllen,
                letter.fds,
            )
        },
    )
}

fn open_letter(letter: &mut Letter, mut control: &[u8]) {
    while control.len() >= HEADER {
        let length = usize::from_ne_bytes(control[..8].try_into().expect("eight bytes"));
        let kind = c_int::from_ne_bytes(control[12..16].try_into().expect("four bytes"));
        let data = &control[HEADER..length.min(control.len())];
        match kind {
            libc::SCM_RIGHTS => {
                let fds =
                    data.chunks_exact(4).map(|fd| Fd::from_ne_bytes(fd.try_into().expect("four bytes")));
                letter.fds.extend(fds);
            }
            libc::SCM_CREDENTIALS if data.len() == 12 => letter.credentials = Some(Credentials::of(data)),
            _ => crate::say!("control message of type {kind}"),
        }
        control = &control[length.next_multiple_of(8).min(control.len())..];
    }
}

/// recvfrom(2) with so many bytes of room for the sender's name.
pub fn recvfrom_with(fd: Fd, len: usize, room: usize, flags: c_int) -> Outcome<Vec<u8>> {
    let mut buf = vec![0; len];
    let mut name = [0xee_u8; NAME_ROOM];
    let mut name_length = room as libc::socklen_t;
    // SAFETY: pointers and lengths are those of the buffers, of which the kernel writes no more than it is told.
    let ret = unsafe {
        libc::recvfrom(
            fd,
            buf.as_mut_ptr().cast(),
            len,
            flags,
            name.as_mut_ptr().cast(),
            &raw mut name_length,
        )
    };
    let data = Errno::check(ret).map(|len| {
        buf.truncate(len);
        buf
    });
    noted(
        data,
        || format!("recvfrom({fd}, {len}, {room}, {})", message_flags(flags)),
        |data| {
            let name = show_name(&name[..room.min(NAME_ROOM)], name_length as usize);
            format!("{} {} address {name}", data.len(), Bytes(data))
        },
    )
}

/// A name's length as the kernel tells it, and the bytes for which there was room; what tells it from others is not shown.
fn show_name(room: &[u8], length: usize) -> String {
    let shown: Vec<u8> = room[..length.min(room.len())]
        .iter()
        .map(|&byte| if byte.is_ascii_hexdigit() { b'#' } else { byte })
        .collect();
    let untouched = room[length.min(room.len())..].iter().all(|&byte| byte == 0xee);
    format!("{length} {} untouched behind: {untouched}", Bytes(&shown))
}

/// getsockname(2), or of the peer getpeername(2).
pub fn name_of(fd: Fd, of_peer: bool) -> Outcome<usize> {
    let mut name = [0xee_u8; NAME_ROOM];
    let mut length = NAME_ROOM as libc::socklen_t;
    let ask = if of_peer { libc::getpeername } else { libc::getsockname };
    // SAFETY: pointer and length are those of `name`.
    let ret = unsafe { ask(fd, name.as_mut_ptr().cast(), &raw mut length) };
    let call = if of_peer { "getpeername" } else { "getsockname" };
    noted(
        Errno::check(ret as isize).map(|_| length as usize),
        || format!("{call}({fd})"),
        |&length| show_name(&name, length),
    )
}

/// bind(2) to a name that the kernel chooses (`AF_UNIX`: an address of nothing but the family).
pub fn bind_automatically(fd: Fd) -> Outcome<usize> {
    let family = libc::AF_UNIX as libc::sa_family_t;
    // SAFETY: pointer and length are those of `family`.
    let ret = unsafe { libc::bind(fd, (&raw const family).cast(), size_of_val(&family) as libc::socklen_t) };
    noted_number(Errno::check(ret as isize), || format!("bind({fd}, any name)"))
}

/// `SO_PEERCRED`: who made the other end.
pub fn peer_credentials(fd: Fd) -> Outcome<Credentials> {
    let mut bytes = [0u8; 12];
    let mut length = bytes.len() as libc::socklen_t;
    let pointer: *mut c_void = bytes.as_mut_ptr().cast();
    // SAFETY: pointer and length are those of `bytes`.
    let ret = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, pointer, &raw mut length) };
    noted(
        Errno::check(ret as isize).map(|_| Credentials::of(&bytes)),
        || format!("getsockopt({fd}, SO_PEERCRED)"),
        |credentials| credentials.show(),
    )
}

/// ioctl(2) with `SIOCATMARK`: whether the next byte is behind urgent data.
pub fn at_mark(fd: Fd) -> Outcome<bool> {
    /// Of asm-generic/sockios.h.
    const SIOCATMARK: libc::c_ulong = 0x8905;
    let mut at: c_int = 0;
    // SAFETY: SIOCATMARK writes one int.
    let ret = unsafe { libc::ioctl(fd, SIOCATMARK, &raw mut at) };
    noted_number(Errno::check(ret as isize).map(|_| at != 0), || format!("ioctl({fd}, SIOCATMARK)"))
}

/// sockatmark(3)
pub fn sockatmark(fd: Fd) -> Outcome<bool> {
    unsafe extern "C" {
        fn sockatmark(fd: c_int) -> c_int;
    }
    // SAFETY: takes a number.
    let ret = unsafe { sockatmark(fd) };
    noted_number(Errno::check(ret as isize).map(|at| at != 0), || format!("sockatmark({fd})"))
}
