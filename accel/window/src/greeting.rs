//! Words in a window's header by which a client asks for the window and is given it, where nothing else goes between the two: a client and
//! a server in machines of their own, of which the client's runs the server's. Knows nothing of how a server is run.
//!
//! ```text
//!   client: pairs, asked = n ─▶ runs the server ─▶ server: makes the window anew, pairs given, answered = n ─▶ client: opens it
//!   client: pairs = 0, asked = n + 1 ─▶ server: nobody has the window ─▶ answered = n + 1
//! ```
//! All of it may be anything at any time: what a client writes there ends its own connection, or the one that its machine has there.

use std::sync::atomic::Ordering;

use wire::ring::{Region, Word};

use crate::Error;

/// Where the words are in the header.
const ASKED: u64 = 192;
const PAIRS: u64 = 196;
const ANSWERED: u64 = 200;
const GIVEN: u64 = 204;

/// The words.
#[derive(Clone, Debug)]
pub struct Greeting {
    asked: Word,
    pairs: Word,
    answered: Word,
    given: Word,
}

impl Greeting {
    /// Those of a region in which there may be no window yet.
    ///
    /// # Errors
    /// It has no room for a header.
    pub fn of(region: &Region) -> Result<Self, Error> {
        Ok(Self {
            asked: region.word(ASKED)?,
            pairs: region.word(PAIRS)?,
            answered: region.word(ANSWERED)?,
            given: region.word(GIVEN)?,
        })
    }

    /// For a client: asks for a window of so many pairs, or, with none, gives it back. The question's number.
    pub fn ask(&self, pairs: u32) -> u32 {
        self.pairs.store(pairs, Ordering::Relaxed);
        // Behind that: who sees the number sees the pairs.
        self.asked.add(1, Ordering::Release).wrapping_add(1)
    }

    /// For a client: how many pairs it was given, none if it can have no window; nothing as long as the question was not answered.
    pub fn answer_to(&self, number: u32) -> Option<u32> {
        let answered = self.answered.load(Ordering::Acquire) == number;
        answered.then(|| self.given.load(Ordering::Relaxed))
    }

    /// For a server: the last question's number, and how many pairs were asked for.
    pub fn asked(&self) -> (u32, u32) {
        let number = self.asked.load(Ordering::Acquire);
        (number, self.pairs.load(Ordering::Relaxed))
    }

    /// For a server that begins: the last question that was answered.
    pub fn answered(&self) -> u32 {
        self.answered.load(Ordering::Relaxed)
    }

    /// For a server: answers a question.
    pub fn answer(&self, number: u32, pairs: u32) {
        self.given.store(pairs, Ordering::Relaxed);
        self.answered.store(number, Ordering::Release);
    }

    /// What changes with each question: a server waits for that.
    pub fn word(&self) -> Word {
        self.asked.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Geometry, Window};

    #[test]
    fn a_question_has_its_answer_and_no_other() {
        let (_, window) = Window::create(Geometry::new(1, 2, 4096).unwrap()).unwrap();
        let (client, server) = (window.region(), window.region());
        let (client, server) = (Greeting::of(client).unwrap(), Greeting::of(server).unwrap());
        let first = client.ask(7);
        assert_eq!(client.answer_to(first), None);
        assert_eq!(server.asked(), (first, 7));
        server.answer(first, 3);
        assert_eq!((client.answer_to(first), server.answered()), (Some(3), first));
        let second = client.ask(0);
        assert_eq!((client.answer_to(second), server.asked()), (None, (second, 0)));
        server.answer(second, 0);
        assert_eq!(client.answer_to(second), Some(0));
        assert_eq!(client.answer_to(first), None);
        assert_eq!(server.word().load(Ordering::SeqCst), second);
    }

    #[test]
    fn making_a_window_leaves_the_question_as_it_is() {
        let (_, window) = Window::create(Geometry::new(1, 2, 4096).unwrap()).unwrap();
        let greeting = Greeting::of(window.region()).unwrap();
        let number = greeting.ask(5);
        Window::format(window.region().clone(), window.geometry()).unwrap();
        assert_eq!(greeting.asked(), (number, 5));
    }
}
