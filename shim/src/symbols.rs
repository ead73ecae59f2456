//! Modules and programs that look for libc's names in libc itself, past whatever was preloaded (`RTLD_DEEPBIND` of
//! dlopen(3), or dlsym(3) in libc's own handle).
//!
//! libc's own table of symbols is made to lead to the hooks: the values of those names that this library exports, in the
//! memory of this process. Then the loader itself binds such a module to them, whenever and however it does so: its
//! constructors, calls that are bound lazily, pointers to functions, libraries that come with it, and dlsym(3).
//!
//! ```text
//!  module ── "poll" ──► libc.so.6: hash table ──► symbol { name, value } ─ ─ ─ ─ ─ ─ ─ ─ ─ ─► libc's poll
//!                                                            └────► hook ── real::poll ────────────┘
//! ```
//!
//! Nothing is written before the first time. The tables are those of ELF-64 (gABI, chapter 5); the hash
//! table is GNU's.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use libc::{Elf64_Phdr, Elf64_Sym, dl_phdr_info};
use rustix::mm::{MprotectFlags, mprotect};
use thallus_transport::uninterrupted::Uninterrupted;

use crate::real;

/// Makes libc's table lead to the hooks. Whether it does so for every name: it can't be written to, perhaps, or a library
/// behind this one has a function of that name, too. Such a one may look for libc's when the hook calls it, and would find the
/// hook again.
///
/// All of [`real`] must be resolved.
pub(crate) fn lead_to_hooks() -> bool {
    let Some((hooks, libc)) = tables() else { return false };
    let mut all = true;
    let mut changes = Vec::new();
    for hook in hooks.all() {
        let (name, address) = (hooks.name(hook), hooks.address(hook));
        // Each version of a name has an entry.
        let entries: Vec<_> = libc.named(name).collect();
        let found = if entries.is_empty() { 0 } else { real::find(name).addr() };
        if entries.iter().any(|&entry| [found, address].contains(&libc.address(entry))) {
            changes.extend(entries.into_iter().map(|entry| (entry, address)));
        } else {
            all &= found == 0;
        }
    }
    if changes.is_empty() {
        return false;
    }
    let _uninterrupted = Uninterrupted::begin();
    // Under the loader's lock, so that no other thread takes the right to write away.
    for_each_object(&mut |object| {
        if object.dlpi_addr == libc.base {
            all &= libc.change(&changes);
        }
    });
    all
}

/// Whether both functions are of one object: a library, or the program itself.
pub(crate) fn share_an_object(one: *const (), other: *const ()) -> bool {
    let inside = [one, other].map(|function| function.addr() as u64);
    let mut found = false;
    for_each_object(&mut |object| {
        found |= inside.into_iter().all(|address| holds(object, address));
    });
    found
}

/// Whether the address is in libc.
pub(crate) fn is_libcs(address: *const c_void) -> bool {
    /// Where it begins, and where it ends.
    static BOUNDS: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];
    let bounds = || BOUNDS.each_ref().map(|bound| bound.load(Ordering::Relaxed));
    if bounds().contains(&0) {
        let inside = (libc::gnu_get_libc_version as *const ()).addr() as u64;
        for_each_object(&mut |object| {
            if holds(object, inside) {
                let parts = || {
                    segments(object)
                        .iter()
                        .map(|segment| Part::of(object, segment))
                        .filter(|part| part.bytes > 0)
                };
                let start = parts().map(|part| part.start).min();
                let end = parts().map(|part| part.start + part.bytes).max();
                for (bound, found) in BOUNDS.iter().zip([start, end]) {
                    bound.store(found.unwrap_or(0), Ordering::Relaxed);
                }
            }
        });
    }
    let [start, end] = bounds();
    (start..end).contains(&(address.addr() as u64))
}

/// Whether libuv is loaded: in the program itself, as in Node, as a library, or in uvloop's.
pub(crate) fn have_libuv() -> bool {
    // SAFETY: a name; nothing is called.
    let mut found = unsafe { !libc::dlsym(libc::RTLD_DEFAULT, c"uv_loop_init".as_ptr()).is_null() };
    if !found {
        // The program is not to find this failure.
        // SAFETY: it takes nothing.
        unsafe { libc::dlerror() };
    }
    for_each_object(&mut |object| {
        if !found && !object.dlpi_name.is_null() {
            // SAFETY: the loader's, which ends with a zero.
            let path = unsafe { CStr::from_ptr(object.dlpi_name) }.to_bytes();
            let mut parts = path.rsplit(|&byte| byte == b'/');
            let (file, folder) = (parts.next(), parts.next());
            found = file.is_some_and(|file| file.starts_with(b"libuv.so")) || folder == Some(b"uvloop");
        }
    });
    found
}

/// This library's and libc's.
fn tables() -> Option<(Table, Table)> {
    let inside =
        [tables as *const (), libc::gnu_get_libc_version as *const ()].map(|function| function.addr() as u64);
    let mut found = [None, None];
    for_each_object(&mut |object| {
        for (address, found) in inside.into_iter().zip(&mut found) {
            if holds(object, address) {
                *found = Table::of(object);
            }
        }
    });
    let [hooks, libc] = found;
    hooks.zip(libc)
}

/// Has `look` see each object that is loaded, under the loader's lock: it must not panic.
fn for_each_object(mut look: &mut dyn FnMut(&dl_phdr_info)) {
    unsafe extern "C" fn visit(object: *mut dl_phdr_info, _: usize, look: *mut c_void) -> c_int {
        // SAFETY: `for_each_object` hands its own on, and waits.
        let look = unsafe { &mut *look.cast::<&mut dyn FnMut(&dl_phdr_info)>() };
        // SAFETY: the loader's.
        look(unsafe { &*object });
        0
    }
    // SAFETY: what the callback is given lives as long.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut look).cast()) };
}

fn segments(object: &dl_phdr_info) -> &[Elf64_Phdr] {
    // SAFETY: the loader's list.
    unsafe { std::slice::from_raw_parts(object.dlpi_phdr, object.dlpi_phnum.into()) }
}

/// Whether the address is in the object.
fn holds(object: &dl_phdr_info, address: u64) -> bool {
    segments(object).iter().any(|segment| Part::of(object, segment).contains(address))
}

/// A segment that has been loaded.
struct Part {
    start: u64,
    bytes: u64,
    protection: MprotectFlags,
}

impl Part {
    fn of(object: &dl_phdr_info, segment: &Elf64_Phdr) -> Self {
        // PF_X, PF_W and PF_R of elf.h.
        let flags = [(1, MprotectFlags::EXEC), (2, MprotectFlags::WRITE), (4, MprotectFlags::READ)];
        let protection =
            flags.into_iter().filter(|(bit, _)| segment.p_flags & bit != 0).map(|(_, flag)| flag).collect();
        let bytes = if segment.p_type == libc::PT_LOAD { segment.p_memsz } else { 0 };
        Self { start: object.dlpi_addr.wrapping_add(segment.p_vaddr), bytes, protection }
    }

    fn contains(&self, address: u64) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }
}

/// An entry of a dynamic section, `Elf64_Dyn`.
#[repr(C)]
struct Entry {
    tag: u64,
    value: u64,
}

/// Tags of them.
const DT_NULL: u64 = 0;
const DT_STRTAB: u64 = 5;
const DT_SYMTAB: u64 = 6;
const DT_GNU_HASH: u64 = 0x6fff_fef5;

/// The symbols of an object that is never unloaded.
struct Table {
    /// What its addresses are relative to.
    base: u64,
    symbols: *mut Elf64_Sym,
    strings: *const c_char,
    /// The first symbol of each bucket; 0 if it is empty.
    buckets: &'static [u32],
    /// The hash of each symbol from `first` on; its lowest bit says that it is the last of its bucket.
    chains: *const u32,
    first: u32,
    /// How the symbols are protected.
    protection: MprotectFlags,
}

impl Table {
    fn of(object: &dl_phdr_info) -> Option<Self> {
        let base = object.dlpi_addr;
        let dynamic = segments(object).iter().find(|segment| segment.p_type == libc::PT_DYNAMIC)?;
        let mut entry: *const Entry = pointer(base.wrapping_add(dynamic.p_vaddr));
        let (mut symbols, mut strings, mut hashes) = (None, None, None);
        loop {
            // SAFETY: the section ends with a null.
            let Entry { tag, value } = unsafe { entry.read() };
            // The loader has made addresses of them, but not where it may not write.
            let address = if value < base { base + value } else { value };
            match tag {
                DT_NULL => break,
                DT_SYMTAB => symbols = Some(address),
                DT_STRTAB => strings = Some(address),
                DT_GNU_HASH => hashes = Some(pointer(address)),
                _ => {}
            }
            // SAFETY: as above.
            entry = unsafe { entry.add(1) };
        }
        let (symbols, hashes): (u64, *const u32) = (symbols?, hashes?);
        // SAFETY: the hash table begins so: buckets, the first symbol that has a hash, words of the filter.
        let [buckets, first, filter, _] = unsafe { hashes.cast::<[u32; 4]>().read() };
        // SAFETY: the buckets follow the filter, whose words are of 64 bits.
        let list = unsafe { hashes.add(4 + 2 * filter as usize) };
        let mut parts = segments(object).iter().map(|segment| Part::of(object, segment));
        Some(Self {
            base,
            symbols: pointer::<Elf64_Sym>(symbols).cast_mut(),
            strings: pointer(strings?),
            // SAFETY: so many there are.
            buckets: unsafe { std::slice::from_raw_parts(list, buckets as usize) },
            // SAFETY: the chains follow.
            chains: unsafe { list.add(buckets as usize) },
            first,
            protection: parts.find(|part| part.contains(symbols))?.protection,
        })
    }

    /// The symbols that it defines.
    fn all(&self) -> impl Iterator<Item = u32> {
        let indices = self.buckets.iter().flat_map(|&head| self.chain(head)).map(|(index, _)| index);
        indices.filter(|&index| self.defines(index))
    }

    /// Those of this name: one for each version.
    fn named(&self, name: &CStr) -> impl Iterator<Item = u32> {
        let hash = hash(name);
        let bucket = (hash as usize).checked_rem(self.buckets.len());
        let head = bucket.map_or(0, |bucket| self.buckets[bucket]);
        let equal = self.chain(head).filter(move |(_, other)| other | 1 == hash | 1).map(|(index, _)| index);
        equal.filter(move |&index| self.defines(index) && self.name(index) == name)
    }

    /// The symbols of a bucket, with their hashes.
    fn chain(&self, head: u32) -> impl Iterator<Item = (u32, u32)> {
        let mut next = Some(head).filter(|&head| head >= self.first);
        std::iter::from_fn(move || {
            let index = next?;
            // SAFETY: a bucket leads to a symbol that has a hash, and so do those before the last of a chain.
            let hash = unsafe { self.chains.add((index - self.first) as usize) };
            // SAFETY: as above.
            let hash = unsafe { hash.read() };
            next = if hash & 1 == 0 { Some(index + 1) } else { None };
            Some((index, hash))
        })
    }

    fn symbol(&self, index: u32) -> *mut Elf64_Sym {
        // SAFETY: the hash table knows of it.
        unsafe { self.symbols.add(index as usize) }
    }

    fn defines(&self, index: u32) -> bool {
        // SAFETY: a symbol of the loader's, of which only the value is ever written.
        let section = unsafe { (*self.symbol(index)).st_shndx };
        section != 0
    }

    fn name(&self, index: u32) -> &'static CStr {
        // SAFETY: as in `defines`.
        let offset = unsafe { (*self.symbol(index)).st_name };
        // SAFETY: a name of the loader's.
        let name = unsafe { self.strings.add(offset as usize) };
        // SAFETY: it ends with a zero.
        unsafe { CStr::from_ptr(name) }
    }

    /// Relative to [`Self::base`].
    fn value(&self, index: u32) -> &AtomicU64 {
        // SAFETY: a place of the symbol's.
        let value = unsafe { &raw mut (*self.symbol(index)).st_value };
        // SAFETY: it is aligned, and written by [`Self::change`] alone.
        unsafe { AtomicU64::from_ptr(value) }
    }

    fn address(&self, index: u32) -> usize {
        self.base.wrapping_add(self.value(index).load(Ordering::Relaxed)) as usize
    }

    /// Gives symbols other addresses. Whether they have them.
    fn change(&self, changes: &[(u32, usize)]) -> bool {
        let places = || changes.iter().map(|&(index, _)| self.symbol(index).addr());
        let (Some(first), Some(last)) = (places().min(), places().max()) else { return true };
        let start = first & !(rustix::param::page_size() - 1);
        let bytes = last + size_of::<Elf64_Sym>() - start;
        let start = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: its own pages, which can be read and executed as before.
        if unsafe { mprotect(start, bytes, self.protection | MprotectFlags::WRITE) }.is_err() {
            return false;
        }
        for &(index, address) in changes {
            // After all of `real` has been resolved.
            self.value(index).store((address as u64).wrapping_sub(self.base), Ordering::Release);
        }
        // SAFETY: as above. Should it fail, they can be written to.
        let _ = unsafe { mprotect(start, bytes, self.protection) };
        true
    }
}

fn pointer<T>(address: u64) -> *const T {
    std::ptr::with_exposed_provenance(address as usize)
}

/// GNU's: Bernstein's, with 33 as its factor.
fn hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(5381, |hash: u32, &byte| hash.wrapping_mul(33).wrapping_add(byte.into()))
}
