// Who has signed in, on a server with a login. The browser itself sends the cookie of the session.
"use strict";
{
  const base = new URL("../", document.currentScript.src).pathname; // of this server: a proxy may serve it below a path
  const SHOWN = ["run", "view", "step", "rollout"]; // what the page comes back to: no secret of a link goes to a server
  const made = (tag, properties) => Object.assign(document.createElement(tag), properties);

  const comeBack = () => {
    const shown = [...new URLSearchParams(location.hash.slice(1))].filter(([name]) => SHOWN.includes(name));
    return `${location.pathname}#${new URLSearchParams(shown)}`;
  };

  const signIn = () => {
    const link = made("a", { textContent: "sign in", href: `${base}login` });
    link.onclick = () => { link.href = `${base}login?${new URLSearchParams({ next: comeBack() })}`; };
    return link;
  };

  const signOut = (textContent, query) => {
    const button = made("button", { type: "button", textContent });
    button.onclick = async () => {
      const answer = await fetch(`${base}login/logout${query}`, { method: "POST" });
      if (answer.ok) location.assign((await answer.json()).redirect);
    };
    return button;
  };

  fetch(`${base}login/session`).then((answer) => answer.json()).then(({ user }) => {
    const nav = document.querySelector("header nav");
    if (user) nav.append(made("span", { id: "user", className: "quiet", textContent: user.name || user.tenant }), " ", signOut("sign out", ""), " ", signOut("sign out everywhere", "?everywhere=true"));
    else {
      nav.append(signIn());
      const line = made("p", { textContent: "Or " });
      line.append(signIn(), ".");
      document.querySelector("#ask .row").after(line);
    }
  });
}
