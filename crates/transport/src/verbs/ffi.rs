//! The parts of libibverbs that are used, loaded when they are first needed.
//!
//! Structures as in `infiniband/verbs.h` of rdma-core, whose layout has been stable since `IBVERBS_1.1`. A preloaded
//! program must start where there is no such library, so it is never linked; and the `ibverbs` crate's bindings link it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// `struct ibv_context`, up to what is used.
#[repr(C)]
pub(super) struct Context {
    device: *mut c_void,
    ops: Operations,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
}

/// `struct ibv_context_ops`: mostly slots that newer libraries do not use.
#[repr(C)]
struct Operations {
    before_poll_cq: [*mut c_void; 11],
    poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int,
    between: [*mut c_void; 13],
    post_send: unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int,
    after: [*mut c_void; 6],
}

/// `struct ibv_cq`, up to what is used.
#[repr(C)]
pub(super) struct Cq {
    context: *mut Context,
}

/// `struct ibv_qp`, up to what is used.
#[repr(C)]
pub(super) struct Qp {
    context: *mut Context,
    before_number: [u8; 44],
    pub(super) number: u32,
}

/// `struct ibv_mr`.
#[repr(C)]
pub(super) struct Mr {
    before_keys: [u8; 36],
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_qp_cap`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Capacity {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct InitAttributes {
    pub(super) context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) capacity: Capacity,
    pub(super) kind: u32,
    pub(super) signal_all: c_int,
}

/// `struct ibv_global_route`.
#[repr(C)]
#[derive(Default)]
pub(super) struct GlobalRoute {
    pub(super) destination: [u64; 2],
    pub(super) flow_label: u32,
    pub(super) source_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `struct ibv_ah_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Address {
    pub(super) route: GlobalRoute,
    pub(super) lid: u16,
    pub(super) service_level: u8,
    pub(super) path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port: u8,
}

/// `struct ibv_qp_attr`.
#[repr(C)]
#[derive(Default)]
pub(super) struct Attributes {
    pub(super) state: u32,
    pub(super) current_state: u32,
    pub(super) path_mtu: u32,
    pub(super) migration: u32,
    pub(super) qkey: u32,
    pub(super) receive_psn: u32,
    pub(super) send_psn: u32,
    pub(super) destination: u32,
    pub(super) access: u32,
    pub(super) capacity: Capacity,
    pub(super) address: Address,
    pub(super) other_address: Address,
    pub(super) pkey_index: u16,
    pub(super) other_pkey_index: u16,
    pub(super) notify_drained: u8,
    pub(super) draining: u8,
    pub(super) max_reads: u8,
    pub(super) max_reads_served: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port: u8,
    pub(super) timeout: u8,
    pub(super) retries: u8,
    pub(super) rnr_retries: u8,
    pub(super) other_port: u8,
    pub(super) other_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_sge`.
#[repr(C)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) length: u32,
    pub(super) key: u32,
}

/// `struct ibv_send_wr`, with the member `rdma` of its union.
#[repr(C)]
pub(super) struct SendRequest {
    pub(super) id: u64,
    pub(super) next: *mut Self,
    pub(super) pieces: *mut Piece,
    pub(super) count: c_int,
    pub(super) operation: u32,
    pub(super) flags: u32,
    pub(super) immediate: u32,
    pub(super) remote: u64,
    pub(super) remote_key: u32,
    pub(super) rest: [u64; 9],
}

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: u32,
    pub(super) operation: u32,
    pub(super) rest: [u32; 8],
}

/// `struct ibv_port_attr`, up to what is used; the library writes as much as it knows of.
#[repr(C)]
pub(super) struct PortAttributes {
    pub(super) state: u32,
    pub(super) max_mtu: u32,
    pub(super) active_mtu: u32,
    rest: [u32; 61],
}

impl Default for PortAttributes {
    fn default() -> Self {
        Self { state: 0, max_mtu: 0, active_mtu: 0, rest: [0; 61] }
    }
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Context, ops) == 8 && size_of::<Operations>() == 256);
    assert!(offset_of!(Operations, poll_cq) == 88 && offset_of!(Operations, post_send) == 200);
    assert!(offset_of!(Context, cmd_fd) == 264);
    assert!(offset_of!(Qp, number) == 52 && offset_of!(Mr, lkey) == 36);
    assert!(size_of::<InitAttributes>() == 64 && offset_of!(InitAttributes, kind) == 52);
    assert!(size_of::<GlobalRoute>() == 24 && size_of::<Address>() == 32);
    assert!(size_of::<Attributes>() == 144 && offset_of!(Attributes, pkey_index) == 120);
    assert!(offset_of!(Attributes, timeout) == 130 && offset_of!(Attributes, rate_limit) == 136);
    assert!(size_of::<SendRequest>() == 128 && offset_of!(SendRequest, remote) == 40);
    assert!(size_of::<Completion>() == 48 && size_of::<Piece>() == 16);
};

/// `enum ibv_qp_state`.
pub(super) mod state {
    pub(in crate::verbs) const INIT: u32 = 1;
    pub(in crate::verbs) const READY_TO_RECEIVE: u32 = 2;
    pub(in crate::verbs) const READY_TO_SEND: u32 = 3;
    pub(in crate::verbs) const ERROR: u32 = 6;
}

/// `enum ibv_qp_attr_mask`.
pub(super) mod mask {
    pub(in crate::verbs) const STATE: u32 = 1;
    pub(in crate::verbs) const ACCESS: u32 = 1 << 3;
    pub(in crate::verbs) const PKEY_INDEX: u32 = 1 << 4;
    pub(in crate::verbs) const PORT: u32 = 1 << 5;
    pub(in crate::verbs) const ADDRESS: u32 = 1 << 7;
    pub(in crate::verbs) const PATH_MTU: u32 = 1 << 8;
    pub(in crate::verbs) const TIMEOUT: u32 = 1 << 9;
    pub(in crate::verbs) const RETRIES: u32 = 1 << 10;
    pub(in crate::verbs) const RNR_RETRIES: u32 = 1 << 11;
    pub(in crate::verbs) const RECEIVE_PSN: u32 = 1 << 12;
    pub(in crate::verbs) const MAX_READS: u32 = 1 << 13;
    pub(in crate::verbs) const MIN_RNR_TIMER: u32 = 1 << 15;
    pub(in crate::verbs) const SEND_PSN: u32 = 1 << 16;
    pub(in crate::verbs) const MAX_READS_SERVED: u32 = 1 << 17;
    pub(in crate::verbs) const DESTINATION: u32 = 1 << 20;
}

/// `enum ibv_access_flags`.
pub(super) mod access {
    pub(in crate::verbs) const LOCAL_WRITE: c_int = 1;
    pub(in crate::verbs) const REMOTE_WRITE: c_int = 2;
    pub(in crate::verbs) const REMOTE_READ: c_int = 4;

    use super::c_int;
}

/// `enum ibv_wr_opcode`.
pub(super) const RDMA_WRITE: u32 = 0;
/// `enum ibv_wr_opcode`.
pub(super) const RDMA_READ: u32 = 4;
/// `enum ibv_send_flags`.
pub(super) const SIGNALED: u32 = 2;
/// `enum ibv_send_flags`.
pub(super) const INLINE: u32 = 8;
/// `enum ibv_qp_type`: reliable connection.
pub(super) const RC: u32 = 2;
/// `enum ibv_wc_status`: the peer's host has not acknowledged the request, however often it was sent.
pub(super) const RETRIES_EXCEEDED: u32 = 12;
/// `enum ibv_port_state`.
pub(super) const PORT_ACTIVE: u32 = 4;

/// The functions of libibverbs.so.1 that are used.
pub(super) struct Verbs {
    pub(super) get_device_list: unsafe extern "C" fn(*mut c_int) -> *mut *mut c_void,
    pub(super) free_device_list: unsafe extern "C" fn(*mut *mut c_void),
    pub(super) get_device_name: unsafe extern "C" fn(*mut c_void) -> *const c_char,
    pub(super) open_device: unsafe extern "C" fn(*mut c_void) -> *mut Context,
    pub(super) close_device: unsafe extern "C" fn(*mut Context) -> c_int,
    pub(super) query_port: unsafe extern "C" fn(*mut Context, u8, *mut PortAttributes) -> c_int,
    pub(super) alloc_pd: unsafe extern "C" fn(*mut Context) -> *mut c_void,
    pub(super) dealloc_pd: unsafe extern "C" fn(*mut c_void) -> c_int,
    pub(super) reg_mr: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr,
    pub(super) dereg_mr: unsafe extern "C" fn(*mut Mr) -> c_int,
    pub(super) create_cq:
        unsafe extern "C" fn(*mut Context, c_int, *mut c_void, *mut c_void, c_int) -> *mut Cq,
    pub(super) destroy_cq: unsafe extern "C" fn(*mut Cq) -> c_int,
    pub(super) create_qp: unsafe extern "C" fn(*mut c_void, *mut InitAttributes) -> *mut Qp,
    pub(super) modify_qp: unsafe extern "C" fn(*mut Qp, *mut Attributes, c_int) -> c_int,
    pub(super) query_qp: unsafe extern "C" fn(*mut Qp, *mut Attributes, c_int, *mut InitAttributes) -> c_int,
    pub(super) destroy_qp: unsafe extern "C" fn(*mut Qp) -> c_int,
}

impl Verbs {
    fn load() -> Option<Self> {
        // SAFETY: the initializers of rdma-core's library have no preconditions.
        let library = unsafe { Library::new("libibverbs.so.1") }.ok()?;
        // Never closed: providers keep references.
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the field has the type that `infiniband/verbs.h` declares.
                unsafe { *library.get($name).ok()? }
            };
        }
        Some(Self {
            get_device_list: symbol!(b"ibv_get_device_list\0"),
            free_device_list: symbol!(b"ibv_free_device_list\0"),
            get_device_name: symbol!(b"ibv_get_device_name\0"),
            open_device: symbol!(b"ibv_open_device\0"),
            close_device: symbol!(b"ibv_close_device\0"),
            query_port: symbol!(b"ibv_query_port\0"),
            alloc_pd: symbol!(b"ibv_alloc_pd\0"),
            dealloc_pd: symbol!(b"ibv_dealloc_pd\0"),
            reg_mr: symbol!(b"ibv_reg_mr\0"),
            dereg_mr: symbol!(b"ibv_dereg_mr\0"),
            create_cq: symbol!(b"ibv_create_cq\0"),
            destroy_cq: symbol!(b"ibv_destroy_cq\0"),
            create_qp: symbol!(b"ibv_create_qp\0"),
            modify_qp: symbol!(b"ibv_modify_qp\0"),
            query_qp: symbol!(b"ibv_query_qp\0"),
            destroy_qp: symbol!(b"ibv_destroy_qp\0"),
        })
    }

    /// The library, loaded at the first call; `None` where there is none. A connection's first call is
    /// [`Device::open`](super::device::Device::open)'s, which no fork overtakes.
    pub(super) fn get() -> Option<&'static Self> {
        static VERBS: OnceLock<Option<Verbs>> = OnceLock::new();
        VERBS.get_or_init(Self::load).as_ref()
    }

    /// The name of a device in the list.
    ///
    /// # Safety
    /// `device` is an entry of a list that has not been freed.
    pub(super) unsafe fn name_of(&self, device: *mut c_void) -> Option<String> {
        // SAFETY: the caller's promise.
        let name = unsafe { (self.get_device_name)(device) };
        if name.is_null() {
            return None;
        }
        // SAFETY: a C string that lives as long as the device.
        unsafe { CStr::from_ptr(name) }.to_str().ok().map(str::to_owned)
    }
}

/// `ibv_post_send`, which the header defines inline.
///
/// # Safety
/// As for `ibv_post_send`: `request` and those that follow it are live.
pub(super) unsafe fn post_send(qp: *mut Qp, request: *mut SendRequest) -> c_int {
    // SAFETY: a queue pair has a context.
    let context = unsafe { (*qp).context };
    // SAFETY: a context has its operations.
    let post = unsafe { (*context).ops.post_send };
    let mut bad = std::ptr::null_mut();
    // SAFETY: the caller's promise.
    unsafe { post(qp, request, &raw mut bad) }
}

/// `ibv_poll_cq`, which the header defines inline.
///
/// # Safety
/// As for `ibv_poll_cq`.
pub(super) unsafe fn poll_cq(cq: *mut Cq, list: &mut [Completion]) -> c_int {
    // SAFETY: a completion queue has a context.
    let context = unsafe { (*cq).context };
    // SAFETY: a context has its operations.
    let poll = unsafe { (*context).ops.poll_cq };
    // SAFETY: the caller's promise; the list is writable.
    unsafe { poll(cq, list.len() as c_int, list.as_mut_ptr()) }
}

/// What libibverbs would give, for tests without a device. Its functions may not be called, but for those that are given, and `query_qp`.
#[cfg(test)]
pub(super) mod fake {
    use super::*;

    type Poll = unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int;
    type Post = unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int;

    /// A completion queue and a queue pair, for good.
    pub(in crate::verbs) fn pair(poll_cq: Poll, post_send: Post) -> (*mut Cq, *mut Qp) {
        let context = Box::leak(Box::new(context(poll_cq, post_send)));
        let qp = Qp { context, before_number: [0; 44], number: 0 };
        (Box::leak(Box::new(Cq { context })), Box::leak(Box::new(qp)))
    }

    fn context(poll_cq: Poll, post_send: Post) -> Context {
        let null = std::ptr::null_mut();
        let ops = Operations {
            before_poll_cq: [null; 11],
            poll_cq,
            between: [null; 13],
            post_send,
            after: [null; 6],
        };
        Context { device: null, ops, cmd_fd: -1, async_fd: -1 }
    }

    /// A device with these descriptors, and nothing else.
    pub(in crate::verbs) fn descriptors(cmd_fd: c_int, async_fd: c_int) -> Context {
        unsafe extern "C" fn poll(_: *mut Cq, _: c_int, _: *mut Completion) -> c_int {
            -1
        }
        unsafe extern "C" fn post(_: *mut Qp, _: *mut SendRequest, _: *mut *mut SendRequest) -> c_int {
            -1
        }
        Context { cmd_fd, async_fd, ..context(poll, post) }
    }

    /// A library that can only ask for a queue pair's state, which is well.
    pub(in crate::verbs) fn verbs() -> &'static Verbs {
        unsafe extern "C" fn query(
            _: *mut Qp,
            _: *mut Attributes,
            _: c_int,
            _: *mut InitAttributes,
        ) -> c_int {
            0
        }
        macro_rules! never {
            ($($argument:ident)*) => {{
                unsafe extern "C" fn never<$($argument,)* R>($(_: $argument),*) -> R {
                    std::process::abort()
                }
                never
            }};
        }
        Box::leak(Box::new(Verbs {
            get_device_list: never!(A),
            free_device_list: never!(A),
            get_device_name: never!(A),
            open_device: never!(A),
            close_device: never!(A),
            query_port: never!(A B C),
            alloc_pd: never!(A),
            dealloc_pd: never!(A),
            reg_mr: never!(A B C D),
            dereg_mr: never!(A),
            create_cq: never!(A B C D E),
            destroy_cq: never!(A),
            create_qp: never!(A B),
            modify_qp: never!(A B C),
            query_qp: query,
            destroy_qp: never!(A),
        }))
    }
}
