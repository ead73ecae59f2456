//! What goes wrong in real programs, and what is left behind afterwards.

mod faults {
    mod connections;
    mod killed;
    mod kills;
    mod leftovers;
    mod log;
}
