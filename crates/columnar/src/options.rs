//! What a decoder accepts.

/// Whether the contents of buffers are checked before arrays are made of them.
///
/// What costs the same for any number of rows is always checked: that buffers lie in the body, are long enough and
/// aligned, that lengths of children fit, and the first and last offset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Offsets ascend and stay within bounds; strings are UTF-8; dictionary keys, type ids, views and run ends are
    /// valid. Right for other users and other hosts. The body must not be writable by anyone afterwards.
    #[default]
    Validate,
    /// The sender vouches for all of that. See [`DecodeOptions::trust_sender`].
    Trusted,
}

/// What happens to a buffer whose address does not suit its type.
///
/// Rust wants 16 bytes for 128-bit decimals, month-day-nanosecond intervals and views, C++ writers align to 8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Misaligned {
    /// An error: a copy is never made behind the caller's back.
    #[default]
    Refuse,
    /// That buffer alone is copied, and counted by [`Decoder::copied_bytes`](crate::Decoder::copied_bytes).
    Copy,
}

/// Bounds on what a stream may ask for, whether trusted or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of one message's metadata.
    pub metadata: usize,
    /// Bytes of one message's body.
    pub body: usize,
    /// Levels of nested fields.
    pub depth: usize,
    /// Length of any array, also of those that take no memory, and of a dictionary with all its deltas.
    pub rows: usize,
    /// Bytes held by all dictionaries of the stream.
    pub dictionaries: usize,
}

impl Default for Limits {
    /// 16 MiB of metadata, bodies of 2 GiB, 64 levels, 2³¹ − 1 rows, 1 GiB of dictionaries.
    fn default() -> Self {
        Self { metadata: 16 << 20, body: 2 << 30, depth: 64, rows: i32::MAX as usize, dictionaries: 1 << 30 }
    }
}

/// How a [`Decoder`](crate::Decoder) reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeOptions {
    pub(crate) limits: Limits,
    pub(crate) misaligned: Misaligned,
    trust: Trust,
}

impl DecodeOptions {
    pub fn with_limits(self, limits: Limits) -> Self {
        Self { limits, ..self }
    }

    pub fn with_misaligned(self, misaligned: Misaligned) -> Self {
        Self { misaligned, ..self }
    }

    pub fn trust(&self) -> Trust {
        self.trust
    }

    /// Skips the checks that look at every row.
    ///
    /// # Safety
    ///
    /// Every message that is decoded with these options must hold valid Arrow data: a wrong offset or a string that is
    /// not UTF-8 is undefined behaviour in whoever uses the arrays.
    #[allow(unsafe_code, reason = "it is the caller's promise that makes skipping sound")]
    pub unsafe fn trust_sender(self) -> Self {
        self.with_trust(Trust::Trusted)
    }

    pub(crate) fn with_trust(self, trust: Trust) -> Self {
        Self { trust, ..self }
    }
}
