//! URLs that carry their own right: what a signature covers, and whether it does.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// What may be done with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in super::super) enum Operation {
    Read,
    Write,
}

/// A signed URL, as far as the signature covers it. The path and the user are as the caller gave them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in super::super) struct Signed {
    pub(in super::super) path: String,
    pub(in super::super) operation: Operation,
    pub(in super::super) username: Option<String>,
    pub(in super::super) signature: Option<String>,
    pub(in super::super) expiration: Option<i64>,
}

impl Signed {
    /// Tells whether the signature is one by this token, whenever it ends.
    pub(in super::super) fn is_by(&self, token: &str) -> bool {
        let Some(given) = &self.signature else { return false };
        let operation = match self.operation {
            Operation::Read => "read",
            Operation::Write => "write",
        };
        let user = self.username.as_deref().unwrap_or_default();
        let mut text = format!("{}:{operation}:{user}:{token}", self.path);
        if let Some(expiration) = self.expiration {
            text = format!("{text}:{expiration}");
        }
        let wanted = format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text.as_bytes())));
        wanted.as_bytes().ct_eq(given.as_bytes()).into()
    }

    /// Checks a request on a secured sandbox: by the token if that was sent, by the signature if not.
    pub(super) fn check(
        &self,
        token: &str,
        sent: Option<&[u8]>,
        now: i64,
    ) -> Result<(), &'static str> {
        if let Some(sent) = sent.filter(|sent| !sent.is_empty()) {
            let same: bool = token.as_bytes().ct_eq(sent).into();
            return same.then_some(()).ok_or("access token present in header but does not match");
        }
        if self.signature.is_none() {
            return Err("missing signature query parameter");
        }
        if !self.is_by(token) {
            return Err("invalid signature");
        }
        match self.expiration {
            Some(expiration) if expiration < now => Err("signature is already expired"),
            Some(_) | None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_covers_path_operation_user_token_and_time() {
        // printf %s '/home/user/f:read:user:tok:100' | sha256sum | xxd -r -p | base64
        let signed = |expiration: Option<i64>, text: &str| Signed {
            path: "/home/user/f".into(),
            operation: Operation::Read,
            username: Some("user".into()),
            signature: Some(format!("v1_{}", STANDARD_NO_PAD.encode(Sha256::digest(text)))),
            expiration,
        };
        let good = signed(Some(100), "/home/user/f:read:user:tok:100");
        assert_eq!(good.check("tok", None, 100), Ok(()));
        assert_eq!(good.check("tok", None, 101), Err("signature is already expired"));
        assert_eq!(good.check("other", None, 100), Err("invalid signature"));
        assert_eq!(good.check("tok", Some(b"tok"), 999), Ok(()), "the token is enough");
        let wrong = "access token present in header but does not match";
        assert_eq!(good.check("tok", Some(b"no"), 100), Err(wrong));
        for other in [
            Signed { path: "/home/user/g".into(), ..good.clone() },
            Signed { operation: Operation::Write, ..good.clone() },
            Signed { username: None, ..good.clone() },
            Signed { expiration: None, ..good.clone() },
            Signed { expiration: Some(101), ..good.clone() },
        ] {
            assert_eq!(other.check("tok", None, 100), Err("invalid signature"));
        }
        let forever = signed(None, "/home/user/f:read:user:tok");
        assert_eq!(forever.check("tok", None, i64::MAX), Ok(()));
        let missing = Signed { signature: None, ..forever };
        assert_eq!(missing.check("tok", None, 0), Err("missing signature query parameter"));
    }
}
