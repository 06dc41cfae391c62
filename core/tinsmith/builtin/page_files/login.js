// Who has signed in, on a server with a login. The browser itself sends the cookie of the session.
"use strict";
{
  const made = (tag, properties) => Object.assign(document.createElement(tag), properties);

  const signIn = () => {
    const link = made("a", { textContent: "sign in", href: "/login" });
    link.onclick = () => { link.href = `/login?${new URLSearchParams({ next: location.pathname + location.hash })}`; };
    return link;
  };

  const signOut = () => {
    const button = made("button", { type: "button", textContent: "sign out" });
    button.onclick = async () => {
      const answer = await fetch("/login/logout", { method: "POST" });
      if (answer.ok) location.assign((await answer.json()).redirect);
    };
    return button;
  };

  fetch("/login/session").then((answer) => answer.json()).then(({ user }) => {
    const nav = document.querySelector("header nav");
    if (user) nav.append(made("span", { id: "user", className: "quiet", textContent: user.name || user.tenant }), " ", signOut());
    else {
      nav.append(signIn());
      const line = made("p", { textContent: "Or " });
      line.append(signIn(), ".");
      document.querySelector("#ask .row").after(line);
    }
  });
}
