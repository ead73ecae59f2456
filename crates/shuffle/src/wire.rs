//! What both protocols have in common. All numbers are little-endian.

/// Bytes of a text that says why something failed; what is longer is cut.
const TEXT: usize = 4096;

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

pub(crate) fn text(why: &str) -> Vec<u8> {
    why.as_bytes()[..why.floor_char_boundary(TEXT)].to_vec()
}
