//! What each call means for a connection that may have left TCP, in safe terms where the types allow it.

pub(crate) mod descriptor;
pub(crate) mod epoll;
pub(crate) mod lending;
pub(crate) mod load;
pub(crate) mod memory;
pub(crate) mod open;
pub(crate) mod poll;
pub(crate) mod process;
pub(crate) mod select;
pub(crate) mod stream;
