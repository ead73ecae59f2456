//! What joins two stages: who brings too much sleeps.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard};

#[derive(Debug)]
struct State<T> {
    items: VecDeque<T>,
    closed: bool,
}

/// A queue of bounded length.
#[derive(Debug)]
pub(super) struct Queue<T> {
    bound: usize,
    state: Mutex<State<T>>,
    news: Condvar,
    room: Condvar,
}

impl<T> Queue<T> {
    pub(super) fn new(bound: usize) -> Self {
        let state = Mutex::new(State { items: VecDeque::new(), closed: false });
        Self { bound, state, news: Condvar::new(), room: Condvar::new() }
    }

    /// Sleeps while it is full. False once it is closed.
    pub(super) fn push(&self, item: T) -> bool {
        let mut state = self.lock();
        while state.items.len() >= self.bound && !state.closed {
            state = self.room.wait(state).expect("nobody panics with it");
        }
        Self::add(&self.news, &mut state, item)
    }

    /// Adds without waiting. For a stage that gives back what it took: nobody else would make room.
    pub(super) fn put_back(&self, item: T) -> bool {
        Self::add(&self.news, &mut self.lock(), item)
    }

    fn add(news: &Condvar, state: &mut State<T>, item: T) -> bool {
        if !state.closed {
            state.items.push_back(item);
            news.notify_one();
        }
        !state.closed
    }

    /// Sleeps while it is empty. None once it is closed.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(item) = state.items.pop_front() {
                self.room.notify_one();
                return Some(item);
            }
            state = self.news.wait(state).expect("nobody panics with it");
        }
    }

    /// Drops what is in it, and lets everybody go.
    pub(super) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.items.clear();
        self.news.notify_all();
        self.room.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().expect("nobody panics with it")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;

    #[test]
    fn who_brings_too_much_waits_for_room() {
        let queue = Arc::new(Queue::new(2));
        let bringing = {
            let queue = queue.clone();
            thread::spawn(move || (0..1000).for_each(|n| assert!(queue.push(n))))
        };
        let got: Vec<i32> = (0..1000)
            .map(|_| {
                assert!(queue.lock().items.len() <= 2);
                queue.pop().unwrap()
            })
            .collect();
        assert_eq!(got, (0..1000).collect::<Vec<_>>());
        bringing.join().unwrap();
    }

    #[test]
    fn a_closed_queue_keeps_nobody() {
        let queue = Arc::new(Queue::new(1));
        assert!(queue.push(1));
        let full = {
            let queue = queue.clone();
            thread::spawn(move || queue.push(2))
        };
        queue.close();
        assert!(!full.join().unwrap());
        assert_eq!(queue.pop(), None);
        assert!(!queue.put_back(3));
    }
}
