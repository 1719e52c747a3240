//! A client of the soak: does with its sandboxes, at random, everything that can be done with one.

#![expect(clippy::unwrap_used, reason = "a helper of a test may panic as the test may")]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use super::{Backend, Done, Soak};
use crate::calls::{Dice, ask, run};
use crate::support::Place;

/// How many sandboxes each keeps.
const KEEP: usize = 6;

/// A sandbox of a client's.
#[derive(Debug, Clone)]
pub(super) struct Own {
    pub(super) id: String,
    session: String,
    suspended: bool,
    /// Whether its end was asked for, of a daemon that did not live to answer.
    ending: bool,
    /// Whether it was made with a network.
    reaches: bool,
    on: &'static Backend,
}

/// A client with sandboxes of its own.
pub(super) struct Client<'a> {
    pub(super) place: Place,
    pub(super) name: u64,
    pub(super) stop: &'a AtomicBool,
    pub(super) soak: &'a Soak,
    pub(super) dice: Dice,
    pub(super) own: Vec<Own>,
}

impl Client<'_> {
    pub(super) fn work(mut self) -> Vec<Own> {
        while !self.stop.load(Ordering::SeqCst) {
            match self.dice.below(12) {
                0..=2 if self.own.len() < KEEP => self.make(),
                0..=4 => self.end(),
                _ if self.own.is_empty() => self.make(),
                5 => self.use_one(),
                6 | 7 => self.keep_one(),
                _ => self.move_one(),
            }
        }
        self.own
    }

    /// Asks; nothing if the daemon died, or had no room.
    fn ask(&self, on: &Backend, method: &str, path: &str, body: Option<&Value>) -> Option<Value> {
        let Some((status, answer)) = ask(&self.place, method, path, body) else {
            // It is being started again.
            std::thread::sleep(Duration::from_millis(20));
            return None;
        };
        if status == 503 {
            assert_eq!(answer["error"]["code"], "capacity", "{method} {path}: {answer}");
            self.note(on, |done| &done.refused);
            return None;
        }
        assert!((200..300).contains(&status), "{}: {method} {path}: {status} {answer}", on.name);
        Some(answer)
    }

    fn note(&self, on: &Backend, what: impl Fn(&Done) -> &AtomicU64) {
        let of = self.soak.backends.iter().find(|(backend, _)| backend.name == on.name);
        what(&of.expect("it is one of them").1).fetch_add(1, Ordering::SeqCst);
    }

    fn pick(&mut self) -> usize {
        usize::try_from(self.dice.below(self.own.len() as u64)).unwrap()
    }

    fn make(&mut self) {
        let nth = usize::try_from(self.dice.below(self.soak.backends.len() as u64)).unwrap();
        let on = self.soak.backends[nth].0;
        let select = json!({ "use_pool": self.dice.below(2) == 0, "backend": on.name });
        let reaches = on.network && self.dice.below(2) == 0;
        let body = json!({ "select": select, "isolation": on.level, "network_enabled": reaches });
        let Some(made) = self.ask(on, "POST", "/v1/sandboxes", Some(&body)) else { return };
        assert_eq!(made["sandbox"]["backend"], on.name, "{made}");
        self.note(on, |done| &done.made);
        self.take(on, &made, reaches);
    }

    fn take(&mut self, on: &'static Backend, made: &Value, reaches: bool) {
        let id = |value: &Value| value["id"].as_str().unwrap().to_owned();
        let (id, session) = (id(&made["sandbox"]), id(&made["session"]));
        self.soak.known.lock().unwrap().insert(id.clone());
        self.own.push(Own { id, session, suspended: false, ending: false, reaches, on });
    }

    fn end(&mut self) {
        if self.own.is_empty() {
            return;
        }
        let nth = self.pick();
        let Own { id, on, ending, .. } = self.own[nth].clone();
        let path = format!("/v1/sandboxes/{id}");
        self.own[nth].ending = true;
        match ask(&self.place, "DELETE", &path, None) {
            // It is being started again.
            None => return std::thread::sleep(Duration::from_millis(20)),
            Some((204, _)) => self.note(on, |done| &done.ended),
            Some((404, _)) if ending => {}
            Some((status, answer)) => panic!("{}: {path}: {status} {answer}", on.name),
        }
        self.own.swap_remove(nth);
        self.soak.known.lock().unwrap().remove(&id);
    }

    /// Brings one to run that may be suspended, or of which that is not known.
    fn wake(&mut self, nth: usize) -> Option<Own> {
        let own = self.own[nth].clone();
        match ask(&self.place, "GET", &format!("/v1/sandboxes/{}", own.id), None)? {
            (200, _) => {}
            (status, answer) => {
                let fine = status == 404 && own.ending;
                assert!(fine, "{}: {} is lost: {status} {answer}", own.on.name, own.id);
                self.own.swap_remove(nth);
                return None;
            }
        }
        // What is to end may be ending still, and can then do nothing else.
        if own.ending {
            return None;
        }
        if own.suspended {
            self.ask(own.on, "POST", &format!("/v1/sessions/{}/resume", own.session), None)?;
            self.own[nth].suspended = false;
        }
        Some(own)
    }

    /// Writes a file by a command and reads it back by another, and reaches what it may reach.
    fn use_one(&mut self) {
        let nth = self.pick();
        let Some(Own { id, on, reaches, .. }) = self.wake(nth) else { return };
        let word = format!("{}-{}", self.name, self.dice.below(1 << 40));
        let path = format!("/v1/sandboxes/{id}/exec");
        let line = format!("echo {word} > note; (sleep 0.2; :) & cat note; pwd");
        let Some(ran) = self.ask(on, "POST", &path, Some(&run(&line))) else { return };
        let said = ran["stdout"].as_str().unwrap().split_once('\n');
        let (read, place) = said.unwrap_or_else(|| panic!("{}: {ran}", on.name));
        assert_eq!(read, word, "{}: {ran}", on.name);
        self.note(on, |done| &done.ran);
        let stat = format!("/v1/sandboxes/{id}/files/stat?path={}/note", place.trim_end());
        if let Some(stat) = self.ask(on, "GET", &stat, None) {
            assert_eq!(stat["size"], word.len() + 1, "{}: {stat}", on.name);
        }
        let line = format!("bash -c 'cat < /dev/tcp/world.test/{}'", self.soak.port);
        let Some(ran) = self.ask(on, "POST", &path, Some(&run(&line))) else { return };
        let wanted = if reaches { "hello" } else { "" };
        assert_eq!(ran["stdout"], wanted, "{}: {ran}", on.name);
        if reaches {
            self.note(on, |done| &done.reached);
        }
    }

    /// Snapshots one, forks the snapshot, looks at the fork, and forgets the snapshot.
    fn keep_one(&mut self) {
        let nth = self.pick();
        let Some(Own { id, on, reaches, .. }) = self.wake(nth) else { return };
        let word = self.dice.below(1 << 40).to_string();
        let exec = format!("/v1/sandboxes/{id}/exec");
        let line = format!("echo {word} > kept");
        if self.ask(on, "POST", &exec, Some(&run(&line))).is_none() {
            return;
        }
        let path = format!("/v1/sandboxes/{id}/snapshots");
        if !on.snapshots {
            let refused = ask(&self.place, "POST", &path, Some(&json!({})));
            let Some((status, answer)) = refused else { return };
            assert_eq!(answer["error"]["code"], "unsupported", "{}: {status} {answer}", on.name);
            return self.note(on, |done| &done.refused);
        }
        let Some(snapshot) = self.ask(on, "POST", &path, Some(&json!({}))) else { return };
        let snapshot = snapshot["id"].as_str().unwrap().to_owned();
        let path = format!("/v1/snapshots/{snapshot}");
        self.soak.known.lock().unwrap().insert(snapshot);
        let forks = self.ask(on, "POST", &format!("{path}/fork"), Some(&json!({ "count": 1 })));
        for fork in forks.iter().flat_map(|forks| forks["items"].as_array().unwrap()) {
            self.take(on, fork, reaches);
            let id = &self.own.last().unwrap().id;
            let exec = format!("/v1/sandboxes/{id}/exec");
            if let Some(ran) = self.ask(on, "POST", &exec, Some(&run("cat kept"))) {
                assert_eq!(ran["stdout"], format!("{word}\n"), "{}: {ran}", on.name);
                self.note(on, |done| &done.kept);
            }
        }
        self.forget(on, &path);
    }

    /// Removes a snapshot: nothing else would. A daemon may do so and die before it has said it.
    fn forget(&self, on: &Backend, path: &str) {
        for asked_before in std::iter::once(false).chain(std::iter::repeat(true)) {
            match ask(&self.place, "DELETE", path, None) {
                None => std::thread::sleep(Duration::from_millis(20)),
                Some((204, _)) => return,
                Some((404, _)) if asked_before => return,
                Some((status, answer)) => panic!("{}: {path}: {status} {answer}", on.name),
            }
        }
    }

    fn move_one(&mut self) {
        let nth = self.pick();
        let Some(Own { session, on, .. }) = self.wake(nth) else { return };
        // Whether it is so if there is no answer is not known; to resume what runs changes nothing.
        self.own[nth].suspended = true;
        if self.ask(on, "POST", &format!("/v1/sessions/{session}/suspend"), None).is_some() {
            self.note(on, |done| &done.moved);
        }
    }
}
